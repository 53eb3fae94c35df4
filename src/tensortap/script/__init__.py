"""`tensortap run`: any script, as `python` would run it, and observed."""
