"""Losses that are written by hand: find their input and target in autograd's graph and its saved tensors."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

from torch import Tensor

from tensortap.adapters.torch.context.graph import (
    LOSS_NODES,
    NameOf,
    NodeOutput,
    nearest_parameter,
    operations_before,
    softmax_axes,
)
from tensortap.adapters.torch.context.losses import describe, sums_to_one
from tensortap.adapters.torch.context.plain import is_plain
from tensortap.context.caller import frames_of_caller, in_library, shortened_path

_REDUCTIONS: Final = {"MeanBackward0": "mean", "MeanBackward1": "mean", "SumBackward0": "sum", "SumBackward1": "sum"}
_THROUGH: Final = frozenset((
    *_REDUCTIONS, "NegBackward0", "DivBackward0", "MulBackward0", "AddBackward0", "ViewBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SubBackward0", "RsubBackward1", "UnsqueezeBackward0", "SelectBackward0",
))  # fmt: skip
_GUARDS: Final = ("ClampBackward1", "ClampMinBackward0", "ClampBackward0", "AddBackward0", "MaximumBackward0")
_DISTANCES: Final = {"PowBackward0": "mse_loss", "AbsBackward0": "l1_loss"}
_MOST_NODES: Final = 24
_MOST_ELEMENTS: Final = 1 << 20


def loss_by_hand(loss: Tensor, name_of: NameOf) -> tuple[str, dict[str, Any]] | None:
    """Return the name of the loss that a graph computes, and its data as those of a call; None where it is unknown."""
    try:
        return _recognised(loss, name_of)
    except RuntimeError:  # what autograd saved was freed, or changed in place
        return None


def _recognised(loss: Tensor, name_of: NameOf) -> tuple[str, dict[str, Any]] | None:
    nodes = list(_near_top(loss.grad_fn))
    if any(node.name() in LOSS_NODES for node in nodes):
        return None
    reduction = next((_REDUCTIONS[n.name()] for n in nodes if n.name() in _REDUCTIONS), "mean")
    if any(_REDUCTIONS.get(node.name()) == "mean" for node in nodes):
        reduction = "mean"
    logs = [node for node in nodes if node.name() == "LogBackward0"]
    if logs:
        return "log_loss", _of_log(logs, nodes, name_of) | _shared(reduction)
    found = next((node for node in nodes if node.name() in _DISTANCES and _is_difference(node)), None)
    if found is None:
        return None
    return _DISTANCES[found.name()], _of_distance(found, name_of) | _shared(reduction)


def _shared(reduction: str) -> dict[str, Any]:
    return {"train": True, "requires_grad": True, "by_hand": True, "reduction": reduction}


def _near_top(node: Any) -> Iterator[Any]:
    """Yield the nodes nearest to a loss, through sums, means and products."""
    waiting, known = [node] if node is not None else [], 0
    while waiting and known < _MOST_NODES:
        node = waiting.pop(0)
        known += 1
        yield node
        if node.name() in _THROUGH:
            waiting += [parent for parent, _ in node.next_functions if parent is not None]


def _of_log(logs: list[Any], nodes: list[Any], name_of: NameOf) -> dict[str, Any]:
    given = logs[0].next_functions[0][0]
    while given is not None and given.name() in _GUARDS:
        given = next((parent for parent, _ in given.next_functions if parent is not None), None)
    data: dict[str, Any] = _of_output(given, name_of) | {"logs": len(logs)}
    values = getattr(logs[0], "_saved_self", None)
    if is_plain(values) and 0 < values.numel() <= _MOST_ELEMENTS:
        data["input"] = describe(values) | sums_to_one(values)
        data["zeros"] = int((values == 0).sum())
        target = _factor(nodes, values)
        if target is not None:
            data["target"] = describe(target) | _rows(target)
    return data


def _factor(nodes: list[Any], values: Tensor) -> Tensor | None:
    """Return the factor of a logarithm, which is the target."""
    for node in nodes:
        if node.name() != "MulBackward0":
            continue
        for saved in (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None)):
            if is_plain(saved) and saved.shape == values.shape and not saved.requires_grad and saved.dim() > 1:
                return saved
    return None


def _rows(target: Tensor) -> dict[str, Any]:
    sums = target.detach().double().sum(-1)
    binary = bool(((target == 0) | (target == 1)).all())
    return {"binary": binary, "row_sums": [float(sums.min()), float(sums.max())]}


def _is_difference(node: Any) -> bool:
    if node.name() == "PowBackward0" and float(getattr(node, "_saved_exponent", 2)) != 2:
        return False
    parent = node.next_functions[0][0]
    return parent is not None and parent.name() in ("SubBackward0", "RsubBackward1")


def _of_distance(node: Any, name_of: NameOf) -> dict[str, Any]:
    difference, below = getattr(node, "_saved_self", None), node.next_functions[0][0]
    parents = [parent for parent, _ in below.next_functions]
    output = next((parent for parent in parents if parent is not None), None)
    data = _of_output(output, name_of)
    if not is_plain(difference) or len([p for p in parents if p is not None]) != 1:
        return data
    result = getattr(output, "_saved_result", None)
    flipped = parents[0] is None  # target - output
    if is_plain(result) and result.shape == difference.shape:
        target = result.detach() + difference.detach() if flipped else result.detach() - difference.detach()
        data["input"], data["target"] = describe(result), describe(target)
    else:  # what a linear layer gives is not kept; at the beginning it is small beside large targets
        data["input"] = {"shape": list(difference.shape), "dtype": str(difference.dtype).removeprefix("torch.")}
        data["difference"] = describe(difference)
    return data


def _of_output(node: Any, name_of: NameOf) -> dict[str, Any]:
    output = NodeOutput(node)
    return {"operations": operations_before(output), "softmax": softmax_axes(output),
            "produced_by": nearest_parameter(output, name_of)}  # fmt: skip


def line_that_made(tensor: Tensor, depth: int = 1) -> str:
    """Return the line of a running function that assigned a tensor to a name; empty if there is none."""
    frames = frames_of_caller(depth + 1)
    return next((line for frame in frames if (line := line_in_frame(frame, tensor))), "")


def line_in_frame(frame: FrameType, tensor: Tensor) -> str:
    """Return the line of a running function that assigned a tensor to a name; empty where there is none."""
    names = [name for name, value in list(frame.f_locals.items()) if value is tensor]
    if not names or in_library(frame.f_code.co_filename):
        return ""
    return _assignment(frame.f_code.co_filename, frame.f_lineno, names)


def _assignment(file: str, last: int, names: list[str]) -> str:
    assigned = re.compile(rf"^\s*(?:.*[,;]\s*)?({'|'.join(map(re.escape, names))})\s*(?:,[^=]*)?[-+*/]?=[^=]")
    for number in range(last, max(0, last - 80), -1):
        if assigned.match(linecache.getline(file, number)):
            return f"{shortened_path(file)}:{number}"
    return ""
