"""Gradients of what modules take and return, and parameters with their gradients and updates; see README.md.

May import `distributed` and `modules.tensors` of this adapter, `adapters.protocol` and everything below the adapters
(`record`, `reduce`, `select`).
"""
