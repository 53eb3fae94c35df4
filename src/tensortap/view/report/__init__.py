"""A run as one HTML file."""
