"""Which sample of a batch did it: when a loss is not finite or jumps, the rows of the batch are ranked.

In a healthy step, only the loss is compared with earlier ones. May import `context`, `modules` and `model_check` of
this adapter, the adapters' shared modules and everything below the adapters.
"""
