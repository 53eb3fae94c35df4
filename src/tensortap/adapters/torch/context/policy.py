"""Policy gradients: the sign with which the logarithm of a probability times a reward goes into a loss.

Whether such a loss is minus what it should be cannot be read from tensors alone: a cost is minimised by the same sum
with the other sign. The name that the script gives to the factor of the logarithm tells which of the two it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tensortap.adapters.torch.context.handwritten_losses import line_in_frame
from tensortap.adapters.torch.context.plain import is_plain
from tensortap.context.caller import in_library

_REARRANGED: Final = (
    "Mean", "Sum", "View", "UnsafeView", "Reshape", "Squeeze", "Unsqueeze", "Stack", "Cat", "Clone", "Select", "Div",
    "Unbind", "Index", "Slice", "Expand", "Alias", "Transpose", "Permute", "T",
)  # fmt: skip
_CHOICES: Final = ("Gather", "Index", "Select")  # of the action that was taken
_MOST_NODES: Final = 3000
_MOST_WEIGHTS: Final = 512
_MOST_ELEMENTS: Final = 4096
_MOST_FRAMES: Final = 3
_MOST_NAMED: Final = 16  # nodes below a loss that are searched for a name
_GAINS: Final = re.compile(
    r"(^|_)(adv|advs|advantages?|rewards?|returns?|rets?|td_errors?|gaes?|gains?)($|_|\d)|^(R|G|Rs|Gt|delta|deltas)$"
)
_OTHERWISE: Final = re.compile(r"cost|neg|minus|loss|penalt|regret|baseline|mean|std", re.IGNORECASE)

Floats = npt.NDArray[np.float64]


def reward_sign(loss: Tensor, frames: Iterable[FrameType]) -> dict[str, Any] | None:
    """Return the sign of log-probability times reward in a loss, −1 where rewards are sought, and the reward's name.

    None where the loss has no such product, where the script has no name for its factor, or where signs disagree.
    """
    found = list(_products(loss.grad_fn))
    signs = {sign for sign, _, _ in found}
    if not found or len(signs) != 1:
        return None
    weights = np.concatenate([weight for _, weight, _ in found])
    users = [frame for frame in frames if not in_library(frame.f_code.co_filename)][:_MOST_FRAMES]
    named = list(_named(users))
    for name, values in named:
        direction = _direction(weights, values)
        if direction and not any(_are_opposite(values, other) for _, other in named):
            return {"sign": signs.pop() * direction, "reward": name, "made_at": _line_of_term(found[0][2], users)}
    return None


def _line_of_term(way: tuple[Any, ...], frames: Iterable[FrameType]) -> str:
    """Return the line that assigned the innermost term of a sum that has a name."""
    for node in reversed(way):
        for frame in frames:
            for value in list(frame.f_locals.values()):
                if isinstance(value, Tensor) and value.grad_fn is node and (line := line_in_frame(frame, value)):
                    return line
    return ""


def _products(node: Any) -> Iterator[tuple[int, Floats, tuple[Any, ...]]]:
    """Yield each product of a log-probability and a factor without gradient in a sum.

    With its sign, the factor, and the nodes from the loss to it.
    """
    waiting: list[tuple[Any, int, tuple[Any, ...]]] = [(node, 1, ())]
    known = given = 0
    while waiting and known < _MOST_NODES and given < _MOST_WEIGHTS:
        node, sign, way = waiting.pop()
        known += 1
        product = _product(node, sign) if _name(node) == "Mul" else None
        if product is not None:
            given += 1
            yield (*product, way)
        else:
            way = (*way, node) if len(way) < _MOST_NAMED else way
            waiting += [(parent, s, way) for parent, s in _terms(node, sign) if parent is not None]


def _terms(node: Any, sign: int) -> list[tuple[Any, int]]:
    """Return the terms of a sum, a mean or a multiple, each with its sign; none of anything else."""
    name, parents = _name(node), [parent for parent, _ in node.next_functions]
    if name in ("Neg", "Rsub"):
        return [(parents[0], -sign)]
    if name == "Sub":
        return [(parents[0], sign), *((parent, -sign) for parent in parents[1:])]
    if name == "Mul":
        factor = _constant(node)
        return [] if factor is None else [(parent, sign if factor > 0 else -sign) for parent in parents]
    return [(parent, sign) for parent in parents] if name == "Add" or name in _REARRANGED else []


def _product(node: Any, sign: int) -> tuple[int, Floats] | None:
    """Return sign and factor of a product with the logarithm of a probability; None of any other product."""
    ways = [parent for parent, _ in node.next_functions if parent is not None]
    if len(ways) != 1 or not (way := _log_probability(ways[0])):
        return None
    slot = "_saved_other" if node.next_functions[0][0] is not None else "_saved_self"
    factor = getattr(node, slot, None)
    if isinstance(factor, (int, float)):
        factor = torch.tensor(float(factor))
    if not is_plain(factor) or not 0 < factor.numel() <= _MOST_ELEMENTS:
        return None
    return sign * way, factor.detach().double().reshape(-1).numpy()


def _constant(node: Any) -> float | None:
    """Return the constant factor of a product; None if the factor is a tensor."""
    saved = [getattr(node, name, None) for name in ("_saved_self", "_saved_other")]
    numbers = [float(s) for s in saved if isinstance(s, (int, float)) or (is_plain(s) and s.dim() == 0)]
    return numbers[0] if len(numbers) == 1 else None


def _log_probability(node: Any) -> int:
    """Return 1 for the logarithm of an action's probability, −1 for minus it, and 0 for anything else."""
    sign, chosen = 1, False
    for _ in range(24):
        if node is None:
            return 0
        name = _name(node)
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        if name == "Neg":
            sign = -sign
        elif name in ("NllLoss", "NllLoss2D", "BinaryCrossEntropyWithLogits"):
            return -sign
        elif name in ("LogSoftmax", "Log"):
            return sign if chosen or _chooses(parents) else 0
        elif name == "Sub" and (_is_gaussian(node) or (chosen and any(_name(p) == "Logsumexp" for p in parents))):
            return sign
        chosen = chosen or name in _CHOICES
        if len(parents) != 1 or (name not in _REARRANGED and name not in (*_CHOICES, "Neg")):
            return 0
        node = parents[0]
    return 0


def _chooses(parents: list[Any]) -> bool:
    """Return whether a value was chosen before its logarithm was taken."""
    for node in parents[:1]:
        for _ in range(4):
            if node is None or not node.next_functions:
                return False
            if _name(node) in _CHOICES:
                return True
            node = node.next_functions[0][0]
    return False


def _is_gaussian(node: Any) -> bool:
    """Return whether a difference is the log_prob of torch.distributions.Normal: −(x − mean)² / 2 var minus
    constants.
    """
    seen = []
    for _ in range(6):
        if node is None:
            return False
        seen.append(_name(node))
        if seen[-1] == "Pow":
            return seen.count("Neg") == 1 and "Div" in seen
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def _named(frames: Iterable[FrameType]) -> Iterator[tuple[str, Floats]]:
    """Yield the variables that the script calls a reward, a return or an advantage, with their values."""
    for frame in frames:
        names = dict(frame.f_locals)
        for holder in list(names.values()):
            if type(holder).__module__ == "__main__" and hasattr(holder, "__dict__"):
                names |= {name: value for name, value in vars(holder).items() if name not in names}
        for name, value in names.items():
            if _GAINS.search(name) and not _OTHERWISE.search(name) and (values := _values(value)) is not None:
                yield name, values


def _values(value: Any) -> Floats | None:
    try:
        if isinstance(value, Tensor):
            return value.detach().double().reshape(-1).numpy() if 0 < value.numel() <= _MOST_ELEMENTS else None
        if isinstance(value, (int, float, np.ndarray)) or (isinstance(value, (list, tuple)) and value):
            found = np.asarray([_number(v) for v in value] if isinstance(value, (list, tuple)) else value, np.float64)
            return found.reshape(-1) if 0 < found.size <= _MOST_ELEMENTS else None
    except (TypeError, ValueError, RuntimeError):  # a list of other things, a tensor on another device
        return None
    return None


def _number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def _direction(weights: Floats, values: Floats) -> int:
    """Return 1 if the factors equal these values, −1 if they equal the negated values, 0 if neither or both."""
    if weights.size < 2 or not np.any(weights):
        return 0
    same, opposite = _within(weights, values), _within(-weights, values)
    return 1 if same and not opposite else -1 if opposite and not same else 0


def _are_opposite(values: Floats, other: Floats) -> bool:
    """Return whether values called an advantage fall when a reward rises: then they are a cost."""
    if values.size != other.size or values.size < 3 or not (values.std() and other.std()):
        return False
    return bool(np.corrcoef(values, other)[0, 1] < 0)


def _within(weights: Floats, values: Floats) -> bool:
    same_size = weights.size == values.size
    if same_size and any(np.allclose(w, values, rtol=1e-4, atol=1e-6) for w in (weights, weights[::-1])):
        return True
    ordered = np.sort(values)
    at = np.clip(np.searchsorted(ordered, weights), 1, max(1, ordered.size - 1)) if ordered.size > 1 else None
    if at is None:
        return False
    nearest = np.minimum(np.abs(ordered[at] - weights), np.abs(ordered[at - 1] - weights))
    return bool(np.all(nearest <= 1e-4 * np.abs(weights) + 1e-6))


def _name(node: Any) -> str:
    return re.sub(r"Backward\d*$", "", str(node.name()))
