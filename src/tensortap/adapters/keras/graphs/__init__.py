"""Taps inside TensorFlow graphs: variables that a graph writes and the host reads after the step.

May import `adapters.keras.observer` and the shared modules of `adapters`; loads TensorFlow.
"""
