"""A run on the terminal."""
