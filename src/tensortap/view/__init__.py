"""Ways to look at a run."""
