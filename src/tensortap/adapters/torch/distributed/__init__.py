"""Several processes: the rank, shards of DTensors, fully_shard and pipeline stages."""
