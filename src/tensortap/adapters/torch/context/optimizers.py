"""Optimizers as they are made, changed and stepped: rates, what they hold, how old they are."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

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
        self.named = {name: p for name, p in named.items() if p.grad is not None and not p.grad.is_sparse}
        self.before = [_part(p).clone() for p in self.named.values()]

    def describe(self) -> dict[str, Any]:
        """Return L2 norms of weights and gradients, and each update relative to its weight."""
        weights, gradients, ratios, zeros = [], [], [], []
        for parameter, before in zip(self.named.values(), self.before, strict=True):
            after = _part(parameter)
            size = float(before.double().norm())
            moved = float((after - before).double().norm())
            weights.append(float(parameter.detach().float().norm()))
            gradient = parameter.grad
            gradients.append(0.0 if gradient is None else float(gradient.detach().float().norm()))
            zeros.append(0.0 if gradient is None else float((_part(gradient) == 0).float().mean()))
            ratios.append(moved / size if size else (0.0 if not moved else -1.0))
        names = list(self.named)
        shapes = [list(p.shape) for p in self.named.values()]
        return {"names": names, "shapes": shapes, "weight": weights, "grad": gradients, "update": ratios,
                "zero_grad": zeros}  # fmt: skip


def _part(tensor: Any) -> Any:
    """Return at most 65536 elements, evenly spaced."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 65_536)]


@torch.no_grad()
def has_any_gradient(parameters: list[Any]) -> bool:
    """Return whether any of the parameters has a gradient."""
    return any(p.grad is not None for p in parameters)
