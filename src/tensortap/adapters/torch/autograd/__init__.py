"""Gradients and parameters: output and input gradients from the autograd graph, parameters around the optimizer."""
