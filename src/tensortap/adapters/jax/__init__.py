"""The JAX adapter: tags on layers of NNX, Linen, Equinox and Haiku, and watched step functions.

May import `adapters`' shared modules and everything below `adapters`; loads JAX, and a library only if a model is of
it. README.md says how it works and what was tried.
"""
