"""Which sample of a batch did it: when a loss is not finite or jumps, the rows of the batch are ranked.

Nothing is computed while all goes well but a comparison of the loss with those before it. May import `context`,
`modules` and `model_check` of this adapter, the adapters' shared modules and everything below the adapters.
"""
