"""Tensors on a GPU or another device: reduced there, and copied to the host without waiting.

May import `modules.values` and `distributed` of this adapter and everything below the adapters (`record`, `reduce`).
"""
