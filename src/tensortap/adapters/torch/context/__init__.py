"""The training context of PyTorch: loss calls, backward, optimizers, schedulers, loaders and modes, as events.

Holds: `CONTEXT` (one for the process), the functions that are replaced while somebody listens (`patches`), and what is
read of loss calls, graphs, optimizers, models and batches. May import `tensortap.context` and `adapters/torch`'s
helpers; knows neither probes nor records.
"""
