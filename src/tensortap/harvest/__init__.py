"""Activations of a whole data set: run a model over it and keep what comes out of chosen sites, every row once.

Follow one row: `plan` (what is kept, in which parts) → `sources` (batches) → `job` (the forward pass) → `keep` (rows)
→ `shards` (spread and written) → `unfinished` (committed) → `folder` (the manifest) → `reader` (shuffled batches).
`engines` says who does the parts. May import `adapters`, `store.files`, `reduce` and what lies below; never `watch`.
"""

from tensortap.harvest.drift import Drift, diff
from tensortap.harvest.keep import Keep, pooled, samples, tokens, top_k
from tensortap.harvest.ray_engine import Ray
from tensortap.harvest.reader import Harvest, open_harvest
from tensortap.harvest.run import harvest

__all__ = ["Drift", "Harvest", "Keep", "Ray", "diff", "harvest", "open_harvest", "pooled", "samples", "tokens", "top_k"]
