"""Keras 3, on TensorFlow first of all."""
