"""NumPy-style models: objects whose layers are callables, and scikit-learn."""
