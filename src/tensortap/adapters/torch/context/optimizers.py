"""Optimizers when they are made, changed and stepped: rates, parameters, and number of steps."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tensortap.adapters.torch.context.plain import is_plain
from tensortap.adapters.torch.modules.values import CODES
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import ROW

_OPTIONS: Final = ("lr", "momentum", "weight_decay", "betas", "eps", "nesterov", "maximize", "dampening", "alpha")
_MOST_NAMES: Final = 12
_MOST_ELEMENTS: Final = 16_384  # of a parameter that are looked at


class Rates(NamedTuple):
    """The options of a group that may change while training."""

    lr: float
    momentum: float | None
    weight_decay: float | None


class OptimizerRecord:
    """Facts about one optimizer."""

    def __init__(self, optimizer: Any, number: int, code: str) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.kind = type(optimizer).__name__
        self.number = number
        self.code = code
        self.steps = 0
        self.rates: list[Rates] = rates_of(optimizer)
        self._seen: list[tuple[Any, ...]] = []  # the rates as the groups had them when they were last compared
        self.parameters = parameters_of(optimizer)
        self.recorded = False

    def describe(self) -> dict[str, Any]:
        """Return its groups."""
        optimizer = self.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return {"number": self.number, "groups": [_describe_group(group) for group in groups]}

    def changed(self) -> list[dict[str, Any]]:
        """Return the rates that differ by more than a percent from those recorded last."""
        optimizer = self.optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        seen = [(g.get("lr"), g.get("momentum"), g.get("weight_decay")) for g in groups]
        if seen == self._seen:
            return []
        now = [] if optimizer is None else rates_of(optimizer)
        # A tensor may change in place: it has to be read every time.
        self._seen = [] if any(isinstance(rate, Tensor) for rates in seen for rate in rates) else seen
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
    """Return its parameters, by id."""
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
    """Return the first names; the total number is recorded beside them."""
    return names[:_MOST_NAMES]


class ParameterSizes:
    """The sizes of parameters, their gradients and their updates, around one step of an optimizer."""

    def __init__(self, optimizer: Any, computed: bool) -> None:
        """Copy the parameters that an optimizer is about to change; `computed` says whether the gradients exist
        already.
        """
        held = [p for group in optimizer.param_groups for p in group["params"] if _readable(p)]
        changing = [p for p in held if (_has_gradient(p) if computed else p.requires_grad)]
        with torch.no_grad():
            self._copies = {id(p): (p, _part(p).clone()) for p in changing}

    def describe(self, names: dict[str, Any]) -> dict[str, Any]:
        """Return statistics of weights and gradients by name (`STATISTICS`), and each update relative to its weight."""
        named = {name: p for name, p in names.items() if id(p) in self._copies and _has_gradient(p)}
        before = [self._copies[id(p)][1] for p in named.values()]
        parameters = list(named.values())
        with torch.no_grad():
            gradients = _rows([_part(parameter.grad) for parameter in parameters])
            parts = [_part(parameter) for parameter in parameters]
            moved = _rows(torch._foreach_sub(parts, before) if parts else [])["l2"]
        weights, numel = _rows(before), np.array([p.numel() for p in parameters], np.float64)
        return {
            "names": list(named), "shapes": [list(p.shape) for p in parameters],
            "weight": _statistics(weights, numel), "grad": _statistics(gradients, numel),
            "update": [m / w if w else (0.0 if not m else -1.0) for m, w in zip(moved.tolist(), weights["l2"].tolist(),
                                                                               strict=True)],
        }  # fmt: skip


def _rows(tensors: Any) -> npt.NDArray[Any]:
    """Return the kernel's row of each tensor."""
    rows = np.zeros(len(tensors), ROW)
    at = rows.ctypes.data
    for i, given in enumerate(tensors):
        tensor = given.contiguous()
        kernels.reduce(
            at + i * ROW.itemsize, 0, tensor.data_ptr(), CODES[tensor.dtype], (tensor.numel(),), None
        )  # fmt: skip
    return rows


def _statistics(rows: npt.NDArray[Any], numel: npt.NDArray[Any]) -> list[list[float]]:
    """Return L2, mean, std, min, max and the share of zeros. From a sample, the L2 norm of the whole is estimated."""
    count = rows["numel"]
    columns = [rows["l2"] * np.sqrt(numel / count), rows["mean"], rows["std"], rows["min"], rows["max"]]
    found = np.column_stack([*columns, rows["zeros"] / count])
    found[rows["nan"] + rows["posinf"] + rows["neginf"] == count] = np.nan
    known: list[list[float]] = found.tolist()
    return known


def _has_gradient(parameter: Any) -> bool:
    return parameter.grad is not None and _readable(parameter.grad)


def _readable(tensor: Any) -> bool:
    """Return whether a tensor can be read without waiting for a device or for other ranks."""
    return bool(is_plain(tensor) and tensor.layout is torch.strided and tensor.dtype in CODES and tensor.numel())


def _part(tensor: Any) -> Any:
    """Return about so many elements, evenly spaced, never more than twice as many."""
    flat = tensor.detach().reshape(-1)
    return flat if flat.numel() < 2 * _MOST_ELEMENTS else flat[:: flat.numel() // _MOST_ELEMENTS]
