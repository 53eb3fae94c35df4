"""The training context: what happens around the tensors, as events with a place in the user's code.

Holds: `Event`, `EventLog` and `Sampling`; the line of the user's code (`caller`); what arrays hold (`arrays`); the
lines that data comes from (`origins`). The frameworks' parts are in their adapters (`adapters/torch/context`,
`adapters/keras/context`, `adapters/jax/script`). It imports nothing of ours.
"""
