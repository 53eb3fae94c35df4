"""The training context of Keras: the loss, the optimizer, the data that `fit` was given, and updates, as events.

On every backend: what is compiled has no values that Python could read, so the model is described from its layers and
`compile`, data from the arguments of `fit`, and updates from the variables before and after a step. May import
`adapters.keras.layers`, `tensortap.context` and `reduce`; knows neither probes nor records.
"""
