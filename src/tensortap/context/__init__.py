"""The training context: what happens around the tensors, as events with a place in the user's code.

Holds: `Event`, `EventLog` and `Sampling`. The frameworks' parts are in their adapters (`adapters/torch/context`). It
imports nothing of ours.
"""
