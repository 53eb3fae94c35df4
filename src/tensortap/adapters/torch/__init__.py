"""The PyTorch adapter.

`modules` holds the hooks, `autograd` gradients and parameters, `ops` single operations, `compile` taps inside
torch.compile, `device` tensors on GPUs, `distributed` ranks and shards, `nonfinite` the search for NaN, `script` what
`tensortap run` does to a script. May import `adapters.protocol`, the adapters' shared helpers and everything below the
adapters (`record`, `reduce`, `select`, `distributed`).
"""
