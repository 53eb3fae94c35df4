"""Loss calls and backward passes, as events."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import nn

from tensortap.adapters.torch.context.attention import describe_attention, relation_to_inputs
from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.graph import LossGraph
from tensortap.adapters.torch.context.handwritten_losses import line_that_made, loss_by_hand
from tensortap.adapters.torch.context.last_known import LastKnown
from tensortap.adapters.torch.context.loop import LoopState
from tensortap.adapters.torch.context.losses import describe_call
from tensortap.adapters.torch.context.model_events import ModelEvents
from tensortap.adapters.torch.context.optimizers import shortened
from tensortap.adapters.torch.context.patches import scalar_of
from tensortap.adapters.torch.context.policy import reward_sign
from tensortap.adapters.torch.context.sink import EventHub, guarded
from tensortap.adapters.torch.samples.monitor import SampleMonitor
from tensortap.context.caller import frames_of_caller
from tensortap.context.events import SPARSE
from tensortap.context.origins import frames_of_user, lines_that_return, target_lines

_MOST_NAMES: Final = 400  # of parameters in an event


class LossEvents:
    """Every loss that is computed, and every backward."""

    def __init__(
        self, hub: EventHub, loop: LoopState, models: ModelEvents, samples: SampleMonitor, last_known: LastKnown
    ) -> None:
        self.hub = hub
        self._last_known = last_known
        self._samples = samples
        self._loop = loop
        self._models = models
        self.reached: dict[int, weakref.ref[Any]] = {}  # parameters that a loss depended on
        self._told_targets = False

    @guarded
    def loss_called(self, function: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Describe a call of a loss, now and then."""
        gradients = torch.is_grad_enabled()
        self._loop.loss(gradients)
        self._samples.loss_called(function, args, kwargs, output)
        if self.hub.due((function.__name__, gradients)):
            data = describe_call(function, args, kwargs, output, self._models.name_of)
            ids, target = self._models.tokens(), _second(args, kwargs)
            if ids is not None and target is not None:
                data["shift"] = relation_to_inputs(target, ids, data.get("ignore_index"))
            if gradients and not self._told_targets:
                self._told_targets = True
                data["origins"] = target_lines(frames_of_user())
            data["modes"] = {record.prefix: record.mode for record in self._models.models.values()}
            self.hub.add("loss", function.__name__, user_line(3), data)

    @guarded
    def backward_begins(self, tensors: Any) -> None:
        """Read the graph of a loss, now and then, and check whether earlier gradients are still there."""
        self._loop.backward_begins()
        loss = scalar_of(tensors)
        self._samples.backward_begins(loss)
        if loss is None or not self.hub.due("backward", first=6, then=SPARSE):
            return
        graph = LossGraph(loss, self._models.name_of)
        trainable = self._models.trainable()
        self.reached |= {id(p): weakref.ref(p) for p in trainable.values() if id(p) in graph.reached}
        missing = [name for name, p in trainable.items() if id(p) not in graph.reached] if graph.complete else []
        self._last_known.reached_without_model(graph.unnamed)
        self._last_known.look()
        made_at = line_that_made(loss, 3)
        inside = lines_that_return(made_at) if made_at else []
        if (known := loss_by_hand(loss, self._models.name_of)) is not None:
            self.hub.add("loss", known[0], made_at or user_line(3), known[1] | {"computed_at": inside})
        self.hub.add("backward", "", user_line(3), {
            "attention": describe_attention(
                graph.attentions, graph.upright, self._models.tokens(), self._models.padding(), self._models.name_of
            ),
            "made_at": made_at, "computed_at": inside, "penalty": graph.penalty,
            "softmax_before": graph.softmax_before[:8],
            "activations": graph.activations, "weighted": graph.weighted,
            "multiplied": sorted(graph.multiplied)[:_MOST_NAMES] if graph.complete else [],
            "operations": graph.top, "negated": graph.negated, "scaled": graph.scaled,
            "policy": reward_sign(loss, frames_of_caller(3)),
            "broadcasts": graph.broadcasts, "linear_pairs": graph.linear_pairs[:8], "trainable": len(trainable),
            "missing": shortened(missing), "missing_count": len(missing), "shape": list(loss.shape),
            "value": float(loss.detach().float().mean()),
        })  # fmt: skip

    @guarded
    def dropout_called(self, p: float) -> None:
        """Note a dropout that is active inside a module in evaluation mode: it did not get the mode."""
        caller = frames_of_caller(4)
        module = next((m for f in caller[:6] if isinstance(m := f.f_locals.get("self"), nn.Module)), None)
        if module is not None and not module.training and self.hub.due("dropout", first=4, then=256):
            self.hub.add("dropout", type(module).__name__, user_line(3), {"p": p, "site": self._models.path_of(module)})

    @guarded
    def backward_ended(self) -> None:
        """Remember the gradients after backward."""
        self._loop.backward_ended()


def _second(args: Any, kwargs: Any) -> torch.Tensor | None:
    """Return the target of a call."""
    found = args[1] if len(args) > 1 else kwargs.get("target")
    return found if isinstance(found, torch.Tensor) else None
