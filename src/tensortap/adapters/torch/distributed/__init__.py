"""Several processes: the rank, shards of DTensors, fully_shard and pipeline stages.

May import the shared `distributed` package, `record.recorder` and `types`, and nothing else of this adapter.
"""
