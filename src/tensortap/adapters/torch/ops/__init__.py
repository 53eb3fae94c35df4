"""Single operations such as `matmul`, observed by a function mode while a watched module runs.

May import `modules`, `autograd` and `compile` of this adapter, `adapters.protocol` and everything below the adapters
(`record`, `reduce`, `select`).
"""
