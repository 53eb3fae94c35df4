"""Small models, data and a training loop, and the registry of the trainings that are recorded with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensortap as tt

Batch = tuple[Tensor, Tensor]
STEPS = 40
RELUS = tt.probe("type:ReLU", keep=[tt.stats(), tt.histogram(), tt.units()])
EVERYTHING = ("**", ":input", "**:grad", "**:grad_output", "**:param", "**:update")  # the recommended probes


class Expected(NamedTuple):
    """What a planted fault must lead to: this rule, there. `follows` are rules that its consequences set off too."""

    rule: str
    site: str
    follows: tuple[str, ...] = ()
    severity: str = "warning"


class Planted(NamedTuple):
    """A training: how to record it, and what is to be found; nothing when it is healthy."""

    record: Callable[[Path], None]
    expected: Expected | None


PLANTED: dict[str, Planted] = {}
REFERENCES: dict[str, str] = {}


def training(expected: Expected | None = None, reference: str = "") -> Callable[[Any], Any]:
    def add(record: Callable[[Path], None]) -> Callable[[Path], None]:
        name = record.__name__
        PLANTED[name] = Planted(record, expected)
        if reference:
            REFERENCES[name] = reference
        return record

    return add


def digits(steps: int = STEPS, size: int = 64, scale: float = 16.0, image: bool = False) -> Iterator[Batch]:
    """Batches of handwritten digits, their pixels between 0 and 1."""
    pixels, labels = all_digits()
    order = torch.Generator().manual_seed(1)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (size,), generator=order)
        x = pixels[chosen] / scale
        yield (x.view(-1, 1, 8, 8) if image else x), labels[chosen]


@functools.cache
def all_digits() -> tuple[Tensor, Tensor]:
    """Return the pixels and labels of all of them."""
    from sklearn.datasets import load_digits  # when it is used: every worker imports this file

    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32), torch.tensor(labels)


def train(
    model: nn.Module, path: Path, *probes: Any, batches: Iterable[Batch] | None = None, rate: float = 0.1,
    optimizer: Any = None, loss_of: Any = F.cross_entropy, before: Callable[[int, Any], None] | None = None,
) -> None:  # fmt: skip
    """Train with the recommended probes, or those given."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)
    if not probes:
        probes = (*EVERYTHING, *([RELUS] if any(isinstance(m, nn.ReLU) for m in model.modules()) else []))
    with tt.watch(model, *probes, to=path) as tap:
        for step, (x, y) in enumerate(batches if batches is not None else digits()):
            if before:
                before(step, optimizer)
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            tap.step(loss=loss.item())


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


def scaled(layer: nn.Linear, factor: float) -> None:
    with torch.no_grad():
        layer.weight.mul_(factor)


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Attention(nn.Module):
    """One layer of attention that names its weights."""

    def __init__(self, width: int, heads: int, sharpness: float = 1.0) -> None:
        super().__init__()
        self.heads, self.sharpness = heads, sharpness
        self.qkv = nn.Linear(width, 3 * width)
        self.softmax = nn.Softmax(-1)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, w = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        weights = self.softmax(self.sharpness * q @ k.transpose(-1, -2) / (w // self.heads) ** 0.5)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, w))


class Rows(nn.Module):
    """The digits as eight rows of eight pixels, through attention."""

    def __init__(self, sharpness: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.place = nn.Parameter(torch.randn(8, 32) * 0.1)
        self.norm = nn.LayerNorm(32)
        self.attention = Attention(32, 4, sharpness)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(-1, 8, 8)) + self.place
        x = x + self.attention(self.norm(x))
        return self.head(x.mean(1))


WEIGHTS = tt.probe("**.softmax", keep=tt.full(), when=tt.every(10))
