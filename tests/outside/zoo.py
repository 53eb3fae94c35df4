"""Shapes of models that public zoos contain and that ordinary test models do not have."""

from __future__ import annotations

# Importing each registers its shapes, in this order.
from outside import zoo_computations, zoo_more, zoo_outputs, zoo_parameters  # noqa: F401
from outside.checks import Subject
from outside.shapes import MAKERS


def subjects() -> list[Subject]:
    """Every shape of the four files."""
    return [Subject(f"zoo/{name}", make, train) for name, make, train in MAKERS]
