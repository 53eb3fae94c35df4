"""A third set: models and loops written as their users write them, in PyTorch's own layouts."""
