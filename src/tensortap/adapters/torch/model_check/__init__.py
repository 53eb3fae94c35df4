"""`tt.check_model` for PyTorch: questions about a model that one batch answers, one file for each kind of question.

Every run begins from the same parameters, buffers, attributes and random state, and at the end all of them are put
back. What a check cannot find out is among the skipped ones, with the reason. May import `modules`, `samples`, `state`
and `source` of this adapter, the adapters' shared modules and everything below the adapters.
"""
