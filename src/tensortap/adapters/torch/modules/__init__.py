"""The module tree, the hooks on it, and the tensors that the hooks are given.

May import `autograd`, `compile`, `distributed` and `device` of this adapter, `adapters.protocol` and everything below
the adapters (`record`, `reduce`, `select`).
"""
