"""Optimizers, schedulers and clipping, as events."""

from __future__ import annotations

import weakref
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler

from tensortap.adapters.torch.autograd.optimizers import closure_of
from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.last_known import LastKnown
from tensortap.adapters.torch.context.loop import LoopState
from tensortap.adapters.torch.context.model_events import ModelEvents
from tensortap.adapters.torch.context.optimizers import OptimizerRecord, ParameterSizes, number, parameters_of
from tensortap.adapters.torch.context.sink import EventHub, guarded
from tensortap.context.events import SPARSE

_MOST_MADE: Final = 40  # optimizers and schedulers that are recorded one by one


class OptimizerEvents:
    """Every optimizer of the process that is made or steps."""

    def __init__(self, hub: EventHub, loop: LoopState, models: ModelEvents, last_known: LastKnown) -> None:
        self.hub = hub
        self._last_known = last_known
        self.optimizers: dict[int, OptimizerRecord] = {}
        self.held: dict[int, weakref.ref[Any]] = {}  # parameters of those that stepped
        self._loop = loop
        self._models = models
        self._made = {"optimizer": 0, "scheduler": 0}
        self._sizes: ParameterSizes | None = None
        self._clip: dict[str, Any] = {}
        self._clip_told = False

    @guarded
    def optimizer_made(self, optimizer: Any) -> None:
        """Note a new optimizer and the line that makes it."""
        self._meet(optimizer, user_line(3))

    def _meet(self, optimizer: Any, code: str) -> OptimizerRecord:
        number = self._made["optimizer"] = self._made["optimizer"] + 1
        held = parameters_of(optimizer)
        same = any(o.steps and are_same(o.parameters, held) for o in self.optimizers.values())
        record = self.optimizers[id(optimizer)] = OptimizerRecord(optimizer, number, code)
        self._loop.watch(record)
        if number <= _MOST_MADE:
            self.hub.add(
                "optimizer",
                record.kind,
                code,
                record.describe() | {"steps_before": self._loop.steps, "same_parameters": same},
            )
        return record

    @guarded
    def scheduler_made(self, scheduler: Any) -> None:
        """Note a new scheduler, its numbers, and the line that makes it."""
        self._made["scheduler"] += 1
        if self._made["scheduler"] <= _MOST_MADE:
            options = {k: v for k, v in vars(scheduler).items() if isinstance(v, (int, float)) and k[:1] != "_"}
            options["seen"] = type(scheduler).step is LRScheduler.step  # a scheduler with its own step method
            self.hub.add("scheduler", type(scheduler).__name__, user_line(3), options)

    @guarded
    def scheduler_stepped(self, scheduler: Any) -> None:
        """Note the line that steps a scheduler; making one steps it too."""
        if scheduler.last_epoch > 0 and self.hub.due("schedule", first=2, then=128):
            self.hub.add("schedule", type(scheduler).__name__, user_line(3), {"epoch": scheduler.last_epoch})

    @guarded
    def gradients_reset(self, optimizer: Any) -> None:
        """Note the line that resets gradients."""
        if self.hub.due("zero_grad", first=3, then=4096):
            self.hub.add("zero_grad", type(optimizer).__name__, user_line(3), {})

    @guarded
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note the gradients that an optimizer is about to use."""
        record = self.optimizers.get(id(optimizer))
        if record is None or record.optimizer() is not optimizer:
            record = self._meet(optimizer, "")
        if changed := record.changed():
            self.hub.add("rate", record.kind, record.code, {"number": record.number, "groups": changed})
        closure = closure_of(args, kwargs)
        if closure is None:
            self._note_use(optimizer, record)
        if self.hub.due("sizes", first=4, then=SPARSE):
            self._sizes = ParameterSizes(optimizer, computed=closure is None)
            self._last_known.look()

    @guarded
    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note the result of its step."""
        record = self.optimizers[id(optimizer)]
        if closure_of(args, kwargs) is not None:
            self._note_use(optimizer, record, closure=True)
        record.steps += 1
        self._loop.after_step(record)
        if self._sizes is not None:
            sizes, self._sizes = self._sizes, None
            described = sizes.describe(self._models.trainable())
            self.hub.add("parameters", record.kind, "", described | {"number": record.number})

    def _note_use(self, optimizer: Any, record: OptimizerRecord, closure: bool = False) -> None:
        """Note what an optimizer uses: before its step; after it where a closure computes the gradients inside it."""
        if not record.recorded or len(record.rates) != len(optimizer.param_groups):
            self._record_held(optimizer, record)
        said = self._loop.before_step(record, self._gradients_of(record), closure)
        if said and self.hub.due("loop", first=24, then=32):
            self.hub.add("loop", record.kind, user_line(4), said)
        self._record_clipping()

    def _gradients_of(self, record: OptimizerRecord) -> bool | None:
        """Return whether there is a gradient; None at steps that are not looked at."""
        if self._loop.steps > 64 and self._loop.steps % 16:
            return None
        return any((p := ref()) is not None and p.grad is not None for ref in record.parameters.values())

    def _record_held(self, optimizer: Any, record: OptimizerRecord) -> None:
        record.recorded = True
        record.parameters = parameters_of(optimizer)
        self.held |= record.parameters
        trainable = self._models.trainable()
        held = [name for name, p in trainable.items() if id(p) in record.parameters]
        known = {id(p) for m in self._models.models.values() for _, p in m.parameters()}
        foreign = [key for key in record.parameters if key not in known]
        self.hub.add("holds", record.kind, record.code, {
            "number": record.number, "held": len(held), "of": len(trainable), "foreign": len(foreign),
            "of_held": len(record.parameters),
        })  # fmt: skip

    def before_clipping(self, parameters: list[Any], most: float, norm: Any) -> None:
        """Note the share of the gradient that remains after clipping."""
        if self.hub.active:
            self._clip = {"most": most, "norm": norm, "code": user_line(3) if not self._clip_told else ""}
            self._clip_told = True

    def after_clipping(self, parameters: list[Any]) -> None:
        """Do nothing."""

    def _record_clipping(self) -> None:
        clip, self._clip = self._clip, {}
        norm = number(clip["norm"]) if clip else None
        if norm is not None and self.hub.due("clip", first=6, then=8):
            self.hub.add("clip", "clip_grad_norm_", clip["code"], {"most": clip["most"], "norm": norm,
                                                     "factor": min(1.0, clip["most"] / (norm + 1e-6))})  # fmt: skip


def are_same(one: dict[int, weakref.ref[Any]], other: dict[int, weakref.ref[Any]]) -> bool:
    """Return whether two optimizers hold the same parameters; a new one may have the id of one that is gone."""
    return one.keys() == other.keys() and all(ref() is other[key]() for key, ref in one.items())
