"""Watch the losses of a training; when one goes wrong, add an event with the samples that did it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.plain import is_plain
from tensortap.adapters.torch.context.sink import EventHub
from tensortap.adapters.torch.samples.batches import RecentBatches
from tensortap.adapters.torch.samples.rows import LossCall, call_behind
from tensortap.adapters.torch.samples.suspects import InputSizes, LossHistory, rank
from tensortap.context.events import SPARSE

Parameters = Callable[[], Iterable[Tensor]]


class SampleMonitor:
    """Listen to model calls, loss calls and backward. The loss call is released before backward runs."""

    def __init__(self, hub: EventHub, recent: RecentBatches, parameters: Parameters) -> None:
        self._hub = hub
        self._recent = recent
        self._parameters = parameters
        self._histories: dict[Any, LossHistory] = {}
        self._sizes: dict[Any, InputSizes] = {}
        self._inputs: list[Any] = []  # weak, since a script may free the batch
        self._call: LossCall | None = None

    def model_called(self, inputs: Any) -> None:
        """Remember the inputs of a model."""
        given = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
        self._inputs = [weakref.ref(t) if isinstance(t, Tensor) else t for t in given]

    def loss_called(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Remember the last loss that may be differentiated."""
        if torch.is_grad_enabled():
            self._call = LossCall(function, args, kwargs, output)

    def backward_begins(self, loss: Tensor | None) -> None:
        """Compare the loss with those before it. A loss on a device is not waited for."""
        call, self._call = self._call, None
        if loss is None or loss.numel() != 1 or loss.device.type != "cpu" or not is_plain(loss):
            return
        key = (type(loss.grad_fn), None if call is None else call.function)
        history = self._histories.get(key)
        if history is None:
            history = self._histories[key] = LossHistory()
        value, usual = loss.item(), history.usual
        if why := history.judge(value) or self._out_of_size():
            self._tell(why, loss, usual, call or call_behind(loss))

    def _out_of_size(self) -> str:
        """Return `outsized` where the model's input is far larger than those before it, though the loss is usual."""
        first = next((t for given in self._inputs if _can_be_read(t := _held(given))), None)
        if first is None:
            return ""
        known = self._sizes.get(first.shape[1:])
        if known is None:
            known = self._sizes[first.shape[1:]] = InputSizes()
        return "outsized" if known.judge(first) else ""

    def _tell(self, why: str, loss: Tensor, usual: float, call: LossCall | None) -> None:
        if not self._hub.due(("samples", why), first=16, then=SPARSE):
            return
        inputs = [_held(given) for given in self._inputs]
        found = rank([each for each in inputs if each is not None], call, self._recent, self._parameters(), loss)
        if found:
            self._hub.add("samples", why, user_line(5), {"loss": loss.item(), "before": usual, **found})


def _held(given: Any) -> Any:
    return given() if isinstance(given, weakref.ref) else given


def _can_be_read(given: Any) -> bool:
    """Return whether an argument is a batch of floating-point samples, and reading it waits for no device."""
    return (
        isinstance(given, Tensor) and given.device.type == "cpu" and given.dim() > 1 and given.shape[0] > 1
        and given.is_floating_point() and given.numel() > 0 and is_plain(given)
    )  # fmt: skip
