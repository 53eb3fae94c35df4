"""Faults as people post them with a question: a short script of their own, and one mistake in it."""

from __future__ import annotations

from outside.faults.strangers import data, keras_fit, keras_loops, loops, modes, outputs, sequences

PAIRS = [
    *outputs.PAIRS,
    *data.PAIRS,
    *loops.PAIRS,
    *modes.PAIRS,
    *sequences.PAIRS,
    *keras_fit.PAIRS,
    *keras_loops.PAIRS,
]
