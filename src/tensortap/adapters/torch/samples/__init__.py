"""Which sample of a batch did it: when a loss is not finite or jumps, the rows of the batch are ranked.

Nothing is computed while all goes well but a comparison of the loss with those before it.
"""
