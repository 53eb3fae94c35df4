"""A run as one HTML file: the page with every answer it will ask for.

May import `view.api`, `view.server` (for the built page) and what they may import.
"""
