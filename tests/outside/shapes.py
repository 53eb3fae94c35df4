"""The registry of model shapes: classes that become subjects of `outside.zoo`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

X = (4, 8)
MAKERS: list[tuple[str, Callable[[], tuple[nn.Module, Any]], bool]] = []


def shape(
    train: bool = True, batch: Callable[[], Any] = lambda: torch.randn(X)
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Keep a class as a subject, called with what `batch` makes."""

    def keep(cls: type[nn.Module]) -> type[nn.Module]:
        MAKERS.append((cls.__name__, lambda: (cls(), batch()), train))
        return cls

    return keep


class Base(nn.Module):
    """A module with one linear layer, for shapes that need nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
