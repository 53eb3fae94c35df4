"""Runs, findings, diffs and tensors drawn on the terminal. Imports `store`, `sinks`, `diagnose`, `diff` and below."""
