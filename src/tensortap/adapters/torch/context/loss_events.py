"""Loss calls and backward passes, as events."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.graph import LossGraph
from tensortap.adapters.torch.context.loop import LoopState
from tensortap.adapters.torch.context.losses import describe_call
from tensortap.adapters.torch.context.model_events import ModelEvents
from tensortap.adapters.torch.context.optimizers import shortened
from tensortap.adapters.torch.context.patches import scalar_of
from tensortap.adapters.torch.context.sink import EventHub, guarded


class LossEvents:
    """Every loss that is computed, and every backward."""

    def __init__(self, hub: EventHub, loop: LoopState, models: ModelEvents) -> None:
        self.hub = hub
        self._loop = loop
        self._models = models
        self.reached: dict[int, weakref.ref[Any]] = {}  # parameters that a loss depended on

    @guarded
    def loss_called(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Describe a call of a loss, now and then."""
        gradients = torch.is_grad_enabled()
        self._loop.loss(gradients)
        if self.hub.due((function.__name__, gradients)):
            data = describe_call(function, args, kwargs, output, self._models.name_of)
            data["modes"] = {record.prefix: record.mode for record in self._models.models.values()}
            self.hub.add("loss", function.__name__, user_line(3), data)

    @guarded
    def backward_begins(self, tensors: Any) -> None:
        """Look at the graph of a loss, now and then, and whether gradients of before are still there."""
        self._loop.backward_begins()
        loss = scalar_of(tensors)
        if loss is None or not self.hub.due("backward", first=6, then=32):
            return
        graph = LossGraph(loss, self._models.name_of)
        trainable = self._models.trainable()
        self.reached |= {id(p): weakref.ref(p) for p in trainable.values() if id(p) in graph.reached}
        missing = [name for name, p in trainable.items() if id(p) not in graph.reached] if graph.complete else []
        self.hub.add("backward", "", user_line(3), {
            "operations": graph.top, "negated": graph.negated, "scaled": graph.scaled,
            "broadcasts": graph.broadcasts, "linear_pairs": graph.linear_pairs[:8], "trainable": len(trainable),
            "missing": shortened(missing), "missing_count": len(missing), "shape": list(loss.shape),
            "value": float(loss.detach().float().mean()),
        })  # fmt: skip

    @guarded
    def backward_ended(self) -> None:
        """Remember the gradients as backward left them."""
        self._loop.backward_ended()
