"""Rank the samples of a step whose loss is not finite, or far above those before it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.context.plain import is_plain
from tensortap.adapters.torch.modules.nested import tensors_in_containers
from tensortap.adapters.torch.samples.batches import GivenBatch, RecentBatches, describe_sample, plain_index
from tensortap.adapters.torch.samples.handwritten_losses import handwritten_loss
from tensortap.adapters.torch.samples.rows import LossCall, SampleNumbers, sample_numbers

_WINDOW: Final = 10
_FEWEST: Final = 5  # losses, before one can be a spike
_FACTOR: Final = 2.0  # times the mean of the window; the rule that judges the whole run asks for more
_SIGMA: Final = 3.0
_OUT_OF_SIZE: Final = 30.0  # times the largest magnitude of the inputs before
_LOOKED_AT: Final = 32  # elements of a sample, or a few more
_SHOWN: Final = 5  # samples of an event
_VALUES: Final = 8  # elements of a sample
_CLEAR: Final = 0.3  # a suspicion above it that is twice the next one's names the sample


class LossHistory:
    """The last losses of one kind, with which the next one is compared."""

    __slots__ = ("_sum", "_values")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self._sum = 0.0

    def judge(self, value: float) -> str:
        """Add a loss; return `nonfinite` or `spike` if it is one, else nothing."""
        if not math.isfinite(value):
            return "nonfinite"
        known = self._values
        spike = len(known) >= _FEWEST and self._is_far(value)
        known.append(value)
        self._sum = sum(known)  # summed again: a huge value would leave its rounding error behind
        return "spike" if spike else ""

    @property
    def usual(self) -> float:
        """The mean of the losses before."""
        return self._sum / len(self._values) if self._values else math.nan

    def _is_far(self, value: float) -> bool:
        mean = self.usual
        above = value - mean
        if above < (_FACTOR - 1.0) * abs(mean):
            return False
        spread = sum(abs(each - mean) for each in self._values) / len(self._values)
        return above >= _SIGMA * spread


class InputSizes:
    """The largest magnitudes of the last inputs of one shape, of a few elements of each sample."""

    __slots__ = ("_largest",)

    def __init__(self) -> None:
        self._largest: deque[float] = deque(maxlen=_WINDOW)

    def judge(self, tensor: Tensor) -> bool:
        """Add an input; return whether it is out of size. It is read in every step: it must cost next to nothing."""
        rows = tensor.detach().reshape(tensor.shape[0], -1)
        value = float(rows[:, :: max(1, rows.shape[1] // _LOOKED_AT)].abs().max())
        known = self._largest
        far = len(known) >= _FEWEST and value > _OUT_OF_SIZE * max(known)
        if math.isfinite(value) and not far:
            known.append(value)
        return far


def rank(
    inputs: Iterable[Any], call: LossCall | None, recent: RecentBatches, parameters: Iterable[Tensor],
    loss: Tensor | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the samples of a step, the most suspicious first, as plain values; empty where there are none.

    Where the weights are not finite already, the batch of this step cannot tell: that of the step before is ranked.
    """
    given = [t for _, t in tensors_in_containers(list(inputs)) if is_plain(t)]
    used = [*given, *([] if call is None else _tensors_of(call))]
    batch = recent.of(used)
    spoilt = any(not bool(p.isfinite().all()) for p in parameters if p.is_floating_point())
    if spoilt:
        batch, call, given = recent.before(batch), None, []
    tensors = given if batch is None else [t for t in batch.tensors() if is_plain(t)]
    count = _count(tensors, batch)
    if count is None or count < 2:
        return {}
    if call is None and loss is not None and not spoilt:
        call = handwritten_loss(loss, count)
    numbers = sample_numbers(count, tensors, call)
    indices = [] if batch is None else [plain_index(i) for i in batch.indices if i is not None]
    return {"count": count, "steps_back": int(spoilt), "indices": indices, **_ranked(numbers, tensors, batch)}


def _tensors_of(call: LossCall) -> Iterator[Tensor]:
    return (t for t in (*call.args, *call.kwargs.values()) if isinstance(t, Tensor) and is_plain(t))


def _count(tensors: list[Tensor], batch: GivenBatch | None) -> int | None:
    """Return the number of samples: as many as indices were drawn, or the first axis of the first input."""
    if batch is not None and len(batch.indices) > 1:
        return len(batch.indices)
    return next((int(t.shape[0]) for t in tensors if t.dim()), None)


def _ranked(numbers: SampleNumbers, tensors: list[Tensor], batch: GivenBatch | None) -> dict[str, Any]:
    suspicion = numbers.suspicion()
    order = torch.argsort(suspicion, descending=True, stable=True)[:_SHOWN].tolist()
    first, second = float(suspicion[order[0]]), float(suspicion[order[1]])
    rows = [_described(row, float(suspicion[row]), numbers, tensors, batch) for row in order]
    return {"clear": first >= _CLEAR and first >= 2 * second, "rows": rows}


def _described(
    row: int, suspicion: float, numbers: SampleNumbers, tensors: list[Tensor], batch: GivenBatch | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"row": row, "suspicion": suspicion, "bad_inputs": int(numbers.bad_inputs[row])}
    found["size"] = float(numbers.size[row])
    if numbers.bad_outputs is not None:
        found["bad_outputs"] = int(numbers.bad_outputs[row])
    if numbers.losses is not None:
        found["loss"] = float(numbers.losses[row])
        found["share"] = _share(numbers.losses, row)
        found["usual"] = float(numbers.losses.median())
    found["values"] = [_values(t, row, numbers.count) for t in tensors[:4] if t.dim() and t.shape[0] == numbers.count]
    return found | (describe_sample(batch, row) if batch is not None else {})


def _share(losses: Tensor, row: int) -> float:
    total = float(losses.nansum())
    return float(losses[row]) / total if math.isfinite(total) and total else math.nan


def _values(tensor: Tensor, row: int, count: int) -> dict[str, Any]:
    """Return the first elements of a sample, with those that are not finite before the others."""
    flat = tensor.detach()[row].reshape(-1)[:65536].cpu()
    if flat.is_floating_point():
        bad = (~flat.isfinite()).nonzero()[:3, 0]
        shown = torch.cat([flat[bad], flat[: _VALUES - len(bad)]]).tolist()
    else:
        shown = flat[:_VALUES].tolist()
    return {"shape": list(tensor.shape[1:]), "dtype": str(tensor.dtype).removeprefix("torch."), "first": shown}
