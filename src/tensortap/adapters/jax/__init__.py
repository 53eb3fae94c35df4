"""JAX: Flax NNX and Linen, Equinox, Haiku, and plain functions."""
