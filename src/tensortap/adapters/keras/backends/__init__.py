"""What differs between the frameworks that Keras computes with: one module a backend, `base` for what they share.

May import the modules of `adapters.keras` except `adapter`; each module loads its own framework.
"""
