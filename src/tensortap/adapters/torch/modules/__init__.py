"""The module tree, the hooks on it, and the tensors the hooks are given."""
