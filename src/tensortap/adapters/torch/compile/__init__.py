"""Taps inside what torch.compile makes."""
