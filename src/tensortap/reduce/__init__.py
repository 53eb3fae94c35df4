"""The reduction: from memory to one row of statistics and a histogram."""
