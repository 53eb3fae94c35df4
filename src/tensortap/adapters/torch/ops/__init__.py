"""Single operations, seen by a function mode."""
