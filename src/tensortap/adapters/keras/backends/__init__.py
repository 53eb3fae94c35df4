"""The differences between the frameworks that Keras computes with: one module for each backend, `base` for what they
share.

May import the modules of `adapters.keras` except `adapter`; each module loads its own framework.
"""
