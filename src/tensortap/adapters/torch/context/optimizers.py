"""Optimizers as they are made, changed and stepped: rates, what they hold, how old they are."""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tensortap.adapters.torch.context.plain import is_plain
from tensortap.reduce.summary import summarize

_OPTIONS: Final = ("lr", "momentum", "weight_decay", "betas", "eps", "nesterov", "maximize", "dampening", "alpha")
_MOST_NAMES: Final = 12


class Rates(NamedTuple):
    """What of a group may change while training."""

    lr: float
    momentum: float | None
    weight_decay: float | None


class OptimizerRecord:
    """What is known of one optimizer."""

    def __init__(self, optimizer: Any, number: int, code: str) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.kind = type(optimizer).__name__
        self.number = number
        self.code = code
        self.steps = 0
        self.rates: list[Rates] = rates_of(optimizer)
        self.parameters = parameters_of(optimizer)
        self.told = False

    def describe(self) -> dict[str, Any]:
        """Return its groups."""
        optimizer = self.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return {"number": self.number, "groups": [_describe_group(group) for group in groups]}

    def changed(self) -> list[dict[str, Any]]:
        """Return which rates differ from those that were told last by more than a percent."""
        optimizer = self.optimizer()
        now = [] if optimizer is None else rates_of(optimizer)
        if now == self.rates:
            return []
        pairs = itertools.zip_longest(self.rates, now)
        found = [
            {"group": i, **new._asdict(), "before": None if old is None else old.lr}
            for i, (old, new) in enumerate(pairs)
            if new is not None and (old is None or _apart(old, new))
        ]
        if found:
            self.rates = now
        return found


def rates_of(optimizer: Any) -> list[Rates]:
    """Return the rates of each group."""
    return [
        Rates(number(g.get("lr")) or 0.0, number(g.get("momentum")), number(g.get("weight_decay")))
        for g in optimizer.param_groups
    ]


def parameters_of(optimizer: Any) -> dict[int, weakref.ref[Any]]:
    """Return what it holds, by id."""
    return {id(p): weakref.ref(p) for group in optimizer.param_groups for p in group["params"]}


def _apart(old: Rates, new: Rates) -> bool:
    return any(
        (a is None) != (b is None) or (a is not None and b is not None and abs(a - b) > 0.01 * max(abs(a), abs(b)))
        for a, b in zip(old, new, strict=True)
    )


def number(value: Any) -> float | None:
    """Return a rate as a number; it may be a tensor."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _describe_group(group: dict[str, Any]) -> dict[str, Any]:
    options = {name: group[name] for name in _OPTIONS if name in group}
    sizes = [p.numel() for p in group["params"]]
    return {**{k: number(v) if isinstance(v, Tensor) else v for k, v in options.items()},
            "parameters": len(sizes), "elements": sum(sizes)}  # fmt: skip


def shortened(names: list[str]) -> list[str]:
    """Return the first names; how many there are is told beside them."""
    return names[:_MOST_NAMES]


class ParameterSizes:
    """The sizes of parameters, their gradients and their updates, around one step of an optimizer."""

    def __init__(self, named: dict[str, Any]) -> None:
        self.named = {name: p for name, p in named.items() if _readable(p) and p.grad is not None and _readable(p.grad)}
        self.before = [_part(p).clone() for p in self.named.values()]

    def describe(self) -> dict[str, Any]:
        """Return statistics of weights and gradients by name (`STATISTICS`), and each update relative to its weight."""
        weights, gradients, ratios = [], [], []
        for parameter, before in zip(self.named.values(), self.before, strict=True):
            size, moved = (summarize(part, histogram=False).l2 for part in (before, _part(parameter) - before))
            weights.append(_statistics(before, parameter.numel()))
            gradients.append(_statistics(_part(parameter.grad), parameter.numel()))
            ratios.append(moved / size if size else (0.0 if not moved else -1.0))
        shapes = [list(p.shape) for p in self.named.values()]
        return {"names": list(self.named), "shapes": shapes, "weight": weights, "grad": gradients, "update": ratios}


def _statistics(part: Any, numel: int) -> list[float]:
    """Return L2, mean, std, min, max and the share of zeros; of a part, the L2 norm is that of the whole, estimated."""
    found = summarize(part, histogram=False)
    if not found.finite:
        return [math.nan] * 6
    scale = (numel / found.numel) ** 0.5
    return [found.l2 * scale, found.mean, found.std, found.min, found.max, found.zeros / found.numel]


def _readable(tensor: Any) -> bool:
    """Return whether a tensor can be read without waiting for a device or for other ranks."""
    return bool(is_plain(tensor) and tensor.layout is torch.strided and tensor.numel())


def _part(tensor: Any) -> Any:
    """Return at most 65536 elements, evenly spaced."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 65_536)]
