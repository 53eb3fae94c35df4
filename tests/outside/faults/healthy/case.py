"""A healthy training that begins as the other scripts do."""

from __future__ import annotations

from outside.faults.bases import HEAD
from outside.faults.case import Healthy


def with_head(name: str, text: str) -> Healthy:
    """Return a training whose script imports what the others import, and sets their seed."""
    return Healthy(name, HEAD + text)
