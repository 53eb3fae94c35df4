"""The Keras 3 adapter: taps on layers, training steps and optimizers, on TensorFlow, PyTorch and JAX.

May import `adapters`' shared modules and everything below `adapters`; of the frameworks Keras, and a backend's own
framework in `backends/` and `graphs/`. README.md says how it works and what was tried.
"""
