"""Answers to what the page asks and the report embeds: one function a request, from one snapshot of a run.

Holds: `service` (the requests), one file for each kind of answer, `tiles` and `file_grid` (reading in bins), `wire`
(encoding). May import `store`, `diff`, `diagnose`, `sinks` and what lies below; never `watch` or an adapter.
"""
