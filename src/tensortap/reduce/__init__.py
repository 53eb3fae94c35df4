"""The reduction: from memory to one row of statistics and a histogram.

`statistics` is the registry of what a row holds; `kernel` chooses the C extension or NumPy; `graph_kernel` is the
same arithmetic inside the graphs of frameworks; `merge` folds rows, `summary` shows one. May import `distributed`,
`types`, `errors` and `text`, and no framework.
"""
