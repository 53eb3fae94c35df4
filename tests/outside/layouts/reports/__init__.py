"""Faults that were reported for Megatron, torchtitan and others, in layouts that the other sets do not have."""
