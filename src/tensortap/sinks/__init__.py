"""Destinations of closed steps besides the run folder: one file a destination.

`base` is what a sink of records derives from, `tracker` and `serving` what sinks for experiment trackers and for
metrics servers share, `convert` turns what a user gives as `to=` into a sink, `export` replays a stored run.

May import `record`, `reduce`, `select` and what is below them, and `export` the store too; never an adapter or `watch`.
"""
