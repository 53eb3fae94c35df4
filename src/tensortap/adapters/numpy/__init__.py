"""The NumPy adapter: taps on objects whose layers are callables, scikit-learn's estimators among them.

May import `adapters`' shared modules and everything below `adapters`; loads NumPy only.
"""
