"""`tensortap run`: run any script as `python` would, and record the models in it. Imports `watch` and below."""
