"""Tensors on a GPU or another device: reduced there, copied to the host without waiting."""
