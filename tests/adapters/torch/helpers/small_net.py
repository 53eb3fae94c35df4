"""A small model, a batch for it, and how often each step saw a place."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def x() -> Tensor:
    return torch.randn(2, 3)


def calls(seen, place: str = "0:output") -> dict[int, int]:
    """How many records of a place each step has."""
    found: dict[int, int] = {}
    for record in seen.of(place):
        found[record.step] = found.get(record.step, 0) + 1
    return found
