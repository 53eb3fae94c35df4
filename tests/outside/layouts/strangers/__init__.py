"""Kinds of faults that the other sets lack: biases of heads, norms across heads, halos, smoothing, pairs of a batch."""
