"""Several processes: ranks, the shards of tensors they hold, and which shards are copies.

May import `types` and `errors`, and nothing else of ours.
"""
