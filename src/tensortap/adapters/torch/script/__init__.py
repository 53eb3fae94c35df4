"""Find the models, steps and losses of a script for `tensortap run`. Imports the PyTorch adapter and below."""
