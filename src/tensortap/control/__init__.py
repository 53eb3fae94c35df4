"""Live control: another process sends requests to a running tap, through a socket in its run folder.

    ctl, viewer, MCP ─► client ─► socket in rank=N/ ─► listener ─► TapControl ─► at the end of a step: recorder, adapter

`client` reads run folders and imports nothing that records. `listener` and `tap_control` run in the training process;
nothing of theirs raises into it. May import `adapters`, `store`, `record` and what lies below; never `watch`.
"""
