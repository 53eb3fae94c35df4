"""Read a loss that was written by hand, such as `(output - target).pow(2).mean()`, from autograd's graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.context.plain import is_plain
from tensortap.adapters.torch.samples.rows import LossCall

_MOST_NODES: Final = 24
_FIELDS: Final = ("_saved_self", "_saved_other", "_saved_result")
# Functions of single elements that losses are written with. What was saved is the operand, or of some the result.
_OF_OPERAND: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "LogBackward0": torch.log, "Log2Backward0": torch.log2, "Log10Backward0": torch.log10,
    "Log1PBackward0": torch.log1p, "LogSigmoidBackward0": torch.nn.functional.logsigmoid,
}  # fmt: skip
_AS_SAVED: Final = frozenset({
    "PowBackward0", "AbsBackward0", "MulBackward0", "DivBackward0", "ExpBackward0", "SqrtBackward0", "ClampBackward1",
    "ClampMinBackward0", "MaximumBackward0", "MinimumBackward0", "SigmoidBackward0", "SoftplusBackward0",
    "HuberLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "LogsumexpBackward0", "LinalgVectorNormBackward0",
})  # fmt: skip
# A larger element makes the loss larger through all of these, unless a factor is negative.
_KEEP_ORDER: Final = frozenset({
    "MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1", "AddBackward0", "MulBackward0", "DivBackward0",
    "SqrtBackward0", "ViewBackward0", "ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1",
    "ToCopyBackward0",
})  # fmt: skip


def handwritten_loss(loss: Tensor, count: int) -> LossCall | None:
    """Return the elements nearest to a loss that have a row for each of `count` samples; None where none was saved.

    For a power, a product and an absolute value, the loss of each element is computed too.
    """
    for node, ordered in _nodes_behind(loss):
        name = node.name()
        saved = _saved(node, count) if name in _AS_SAVED or name in _OF_OPERAND else None
        if saved is not None:
            with torch.no_grad():
                return _call(node, name, saved, ordered)
    return None


def _nodes_behind(loss: Tensor) -> Iterator[tuple[Any, bool]]:
    """Give the nodes of the graph, the nearest first, and whether the loss rises with what they give."""
    waiting: deque[tuple[Any, bool]] = deque([(loss.grad_fn, True)])
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node, ordered = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node, ordered
        ordered = ordered and node.name() in _KEEP_ORDER
        waiting.extend((before, ordered) for before, _ in node.next_functions)


def _saved(node: Any, count: int) -> Tensor | None:
    """Return what a node saved of the model's results: a parameter or a weight of the samples tells nothing of them."""
    for field in _FIELDS:
        try:
            saved = getattr(node, field, None)
        except RuntimeError:  # it was freed, or changed in place
            continue
        if (
            isinstance(saved, Tensor) and is_plain(saved) and saved.requires_grad and not saved.is_leaf
            and saved.is_floating_point() and saved.dim() and saved.numel() and saved.shape[0] % count == 0
        ):  # fmt: skip
            return saved.detach()
    return None


def _call(node: Any, name: str, saved: Tensor, ordered: bool) -> LossCall:
    losses = None
    if ordered and name == "AbsBackward0":
        losses = saved.abs()
    elif ordered and name == "PowBackward0" and float(node._saved_exponent) > 0:
        losses = saved.pow(node._saved_exponent)
    elif ordered and name == "MulBackward0":
        losses = _product(node, saved.shape)
    elements = _OF_OPERAND[name](saved) if name in _OF_OPERAND else saved
    return LossCall(None, (elements,), {}, losses)


def _product(node: Any, shape: torch.Size) -> Tensor | None:
    """Return the result of a product whose factors were both saved, as they are if the model made both."""
    try:
        one, other = node._saved_self, node._saved_other
    except RuntimeError:
        return None
    both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape == shape
    return one.detach() * other.detach() if both else None
