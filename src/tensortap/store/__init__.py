"""The run folder: write it, read it, compact it. README.md says how it is kept whole.

Holds: the writer (`folder`, `tail`, `segments`), readers of one snapshot (`snapshot`, `queries`, `facts`,
`tensor_index`, `run`), compaction. May import `record`, `select`, `reduce`, `distributed` and what lies below.
"""
