"""Shapes of models that differ in what they return, and that write in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from outside.shapes import Base, shape


class Plain:
    """An output object without any registration."""

    def __init__(self, logits: torch.Tensor, extra: Any) -> None:
        self.logits = logits
        self.extra = extra


class Slotted:
    """An output object with slots."""

    __slots__ = ("value", "weights")

    def __init__(self, value: torch.Tensor, weights: torch.Tensor) -> None:
        self.value = value
        self.weights = weights


@dataclass
class Data:
    """A dataclass that nobody registered."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


class Named(NamedTuple):
    """A named tuple."""

    first: torch.Tensor
    second: torch.Tensor


@shape()
class ReturnsPlainObject(Base):
    """Return an object whose tensors are attributes."""

    def forward(self, x: torch.Tensor) -> Plain:
        """Compute."""
        h = self.fc(x)
        return Plain(h.relu(), {"hidden": [h]})


@shape()
class ReturnsSlots(Base):
    """Return an object with slots."""

    def forward(self, x: torch.Tensor) -> Slotted:
        """Compute."""
        return Slotted(self.fc(x), self.fc.weight.softmax(-1))


@shape()
class ReturnsDataclass(Base):
    """Return a dataclass."""

    def forward(self, x: torch.Tensor) -> Data:
        """Compute."""
        h = self.fc(x)
        return Data(h.tanh(), (x, h))


@shape()
class ReturnsNamedTuple(Base):
    """Return a named tuple."""

    def forward(self, x: torch.Tensor) -> Named:
        """Compute."""
        return Named(self.fc(x), x.sum())


@shape()
class ReturnsDictOfLists(Base):
    """Return nested dictionaries and lists with None in them."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """Compute."""
        h = self.fc(x)
        return {"a": [h, None, (h.sum(), {"b": h.mean()})], "n": 3, "s": "text"}


@shape()
class ReturnsNothing(Base):
    """Keep the result in an attribute and return None."""

    def forward(self, x: torch.Tensor) -> None:
        """Compute."""
        self.result = self.fc(x).detach()


@shape()
class InPlaceForward(Base):
    """Change the input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        x += 1
        return self.fc(x).relu_()


@shape()
class InPlaceChain(nn.Module):
    """Change what an earlier module returned."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU6(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute."""
        return self.net(x).mul_(2)
