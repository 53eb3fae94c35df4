"""A run in a notebook."""
