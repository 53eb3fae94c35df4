"""A run drawn in a notebook, as HTML or as a figure. Imports `view.terminal`, `store` and below."""
