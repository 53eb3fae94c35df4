"""Numbers for each sample of a batch: values that are not finite, their size, and the loss."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

_LARGE: Final = 10.0  # times the median of the batch: the size from which a sample is suspicious
_DECADES: Final = 2.0  # how many make a suspicion of 1, as much as all of a spike's loss
BAD: Final = 100.0  # the suspicion of an output, a loss or a gradient that is not finite
_NEGLIGIBLE: Final = 1e-12
_MOST_NODES: Final = 6  # between a loss and the function that made it, such as a factor
_BY_NODE: Final = {
    "NllLossBackward0": functional.nll_loss,
    "NllLoss2DBackward0": functional.nll_loss,
    "MseLossBackward0": functional.mse_loss,
    "SmoothL1LossBackward0": functional.smooth_l1_loss,
    "BinaryCrossEntropyBackward0": functional.binary_cross_entropy,
    "BinaryCrossEntropyWithLogitsBackward0": functional.binary_cross_entropy_with_logits,
}


class LossCall(NamedTuple):
    """A call of a loss function, as it was made."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


@dataclass(frozen=True, slots=True)
class SampleNumbers:
    """Numbers about each sample of a batch: arrays over samples, or None if unknown."""

    count: int
    bad_inputs: Tensor  # elements that are not finite
    size: Tensor  # of its values, as a multiple of the batch's median
    bad_outputs: Tensor | None  # elements that are not finite, of what the loss was given
    losses: Tensor | None

    def suspicion(self) -> Tensor:
        """Return a number for each sample; the largest is the first suspect.

        Values that are not finite when they come in outweigh all else; then outputs that are, then size and loss: a
        hundredfold size counts as much as all of the loss that is above the usual.
        """
        found = torch.where(self.size > _LARGE, self.size.log10() / _DECADES, torch.zeros(self.count))
        if self.losses is not None:
            found = torch.maximum(found, _excess(self.losses))
            found += BAD * marks(~self.losses.isfinite())
        if self.bad_outputs is not None:
            found += BAD * marks(self.bad_outputs > 0)
        return found + 1000.0 * marks(self.bad_inputs > 0) + (self.bad_inputs > 0) * self.bad_inputs.log10().clamp(0)


def marks(marked: Tensor) -> Tensor:
    """Return marks as numbers; zeros where all samples are marked, which tells none from another."""
    return torch.zeros(len(marked)) if bool(marked.all()) else marked.float()


def _excess(losses: Tensor) -> Tensor:
    """Return each sample's share of the loss above the median."""
    finite = torch.where(losses.isfinite(), losses, 0.0)
    above = (finite - finite.median()).clamp(min=0.0)
    total = float(above.sum())
    return above / total if total > _NEGLIGIBLE else torch.zeros(len(losses))


def call_behind(loss: Tensor) -> LossCall | None:
    """Return the call of a loss function from autograd's graph, if the call itself was not seen."""
    node = loss.grad_fn
    for _ in range(_MOST_NODES):
        if node is None:
            return None
        function = _BY_NODE.get(node.name())
        if function is not None:
            saved: Any = node
            try:
                return LossCall(function, (saved._saved_self, saved._saved_target), {}, None)
            except RuntimeError:  # freed, or changed in place
                return None
        node = next((before for before, _ in node.next_functions if before is not None), None)
    return None


def sample_numbers(count: int, inputs: Iterable[Tensor], call: LossCall | None) -> SampleNumbers:
    """Return numbers about the samples of a batch."""
    bad, size = torch.zeros(count), torch.ones(count)
    for tensor in inputs:
        rows = _rows(tensor, count)
        if rows is not None and rows.is_floating_point():
            bad += (~rows.isfinite()).sum(1).float()
            size = torch.maximum(size, _relative_size(rows))
    outputs = None if call is None else _outputs(call, count)
    return SampleNumbers(count, bad, size, outputs, None if call is None else losses_of(call, count))


def _relative_size(rows: Tensor) -> Tensor:
    size = torch.where(rows.isfinite(), rows, 0.0).double().square().mean(1).sqrt()
    usual = float(size.median())
    return (size / usual).float() if usual > _NEGLIGIBLE else torch.ones(len(rows))


def _rows(tensor: Tensor, count: int) -> Tensor | None:
    """Return the tensor as one row for each sample, on the CPU."""
    if not tensor.dim() or tensor.shape[0] % count or not tensor.numel() or tensor.is_complex() or tensor.is_sparse:
        return None
    return tensor.detach().reshape(count, -1).cpu()


def _outputs(call: LossCall, count: int) -> Tensor | None:
    first = call.args[0] if call.args else call.kwargs.get("input")
    rows = _rows(first, count) if isinstance(first, Tensor) and first.is_floating_point() else None
    return None if rows is None else (~rows.isfinite()).sum(1).float()


def losses_of(call: LossCall, count: int) -> Tensor | None:
    """Return the loss of each sample, by the same function without its mean; None where it has none."""
    with torch.no_grad():
        value = unreduced(call)
    if value is None or not value.dim() or value.shape[0] % count:
        return None
    return value.reshape(count, -1).float().mean(1).cpu()


def unreduced(call: LossCall) -> Tensor | None:
    """Return the result of a loss with `reduction="none"`."""
    if isinstance(call.output, Tensor) and call.output.dim():
        return call.output
    try:
        bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
        if "reduction" not in bound.signature.parameters:
            return None
        bound.arguments.update(reduction="none")
        for old in ("size_average", "reduce"):
            bound.arguments.pop(old, None)
        value = call.function(*bound.args, **bound.kwargs)
    except Exception:  # a loss that does not know the word, or not for these shapes
        return None
    return value if isinstance(value, Tensor) else None
