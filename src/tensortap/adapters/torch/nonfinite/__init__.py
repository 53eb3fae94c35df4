"""Find where a NaN or an infinity was made: the module, the operation, its line, and why.

May import `modules`, `ops` and `distributed` of this adapter, `adapters.results` and `reduce.summary`.
"""
