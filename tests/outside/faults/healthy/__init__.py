"""Trainings of different kinds that have no fault: what a rule says of them is a false alarm."""

from outside.faults.healthy import (
    architectures,
    decisions,
    generative,
    keras_examples,
    keras_programs,
    objectives,
    procedures,
    representations,
    strangers,
)

PARTS = (
    architectures,
    decisions,
    generative,
    keras_examples,
    keras_programs,
    objectives,
    procedures,
    representations,
    strangers,
)
TRAININGS = [training for part in PARTS for training in part.TRAININGS]
