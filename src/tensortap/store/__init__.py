"""The run folder: writing it, reading it, keeping it tidy."""
