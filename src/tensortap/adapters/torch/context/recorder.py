"""The training context of the process: it listens to PyTorch and adds events to the logs of all taps."""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tensortap.adapters.torch.autograd.clipping import CLIPPING
from tensortap.adapters.torch.context.checkpoint_events import CheckpointEvents
from tensortap.adapters.torch.context.definitions import Definitions
from tensortap.adapters.torch.context.last_known import LastKnown
from tensortap.adapters.torch.context.loader_events import LoaderEvents
from tensortap.adapters.torch.context.loop import LoopState
from tensortap.adapters.torch.context.loss_events import LossEvents
from tensortap.adapters.torch.context.model_events import ModelEvents
from tensortap.adapters.torch.context.optimizer_events import OptimizerEvents
from tensortap.adapters.torch.context.patches import Patches
from tensortap.adapters.torch.context.sink import EventHub
from tensortap.adapters.torch.samples.monitor import SampleMonitor
from tensortap.context.events import EventLog
from tensortap.portable import after_fork


class TrainingContext:
    """The one recorder of the process. Logs join and leave; while there are any, PyTorch's functions are replaced."""

    def __init__(self) -> None:
        self.hub = EventHub()
        self._pending: EventLog | None = None
        self._listening: Listeners | None = None
        after_fork(self._forget)

    def join(self, log: EventLog, owner: object, *, pending: bool = False) -> None:
        """Add events to a log from now on; each owner leaves by itself.

        A pending log only waits for another one, which takes its events over.
        """
        if not self.hub.logs:
            self.hub.begin()
            self._listening = Listeners(self.hub)
        if self._pending is not None:
            waiting, self._pending = self._pending, None
            for event in waiting.take():
                log.put(event)
            self.hub.logs = [(log if known is waiting else known, of) for known, of in self.hub.logs]
        self._pending = log if pending else None
        self.hub.logs.append((log, owner))

    def leave(self, owner: object) -> None:
        """Add no more events for an owner; after the last one nothing of ours is left in PyTorch."""
        staying = [pair for pair in self.hub.logs if pair[1] is not owner]
        if self._listening is not None and not staying:
            self._listening.record_totals()
            self._listening.remove()
            self._listening = self._pending = None
            self.hub.active = False
        self.hub.logs = staying

    def add_model(self, root: nn.Module, prefix: str, called: nn.Module | None = None) -> None:
        """Learn the names of a model's parameters; `called` is what the user calls, such as a wrapper of it."""
        if self._listening is not None:
            self._listening.models.add_model(root, prefix, called)

    def model_called(self, root: nn.Module, inputs: Any) -> None:
        """Note a call of a model from outside: its mode, and what it was given."""
        if self._listening is not None:
            self._listening.models.model_called(root, inputs)

    def _forget(self) -> None:
        """Record nothing in a forked child."""
        self.hub.active = False


class Listeners:
    """All listeners, which exist from the first log to the last."""

    def __init__(self, hub: EventHub) -> None:
        self.hub = hub
        self.loop = LoopState()
        self.loaders = LoaderEvents(hub)
        definitions = Definitions(hub)
        samples = SampleMonitor(hub, self.loaders.recent, lambda: self.models.trainable().values())
        self.models = ModelEvents(hub, self.loop, self.loaders, definitions, samples)
        self.last_known = LastKnown(lambda: self.models.models.values())
        self.losses = LossEvents(hub, self.loop, self.models, samples, self.last_known)
        self.optimizers = OptimizerEvents(hub, self.loop, self.models, self.last_known)
        self._patches = Patches(self.losses, self.optimizers, self.loaders, CheckpointEvents(hub), definitions)
        self._handles = [
            register_optimizer_step_pre_hook(self.optimizers.before_step),
            register_optimizer_step_post_hook(self.optimizers.after_step),
        ]
        CLIPPING.listen(self.optimizers, True)

    def remove(self) -> None:
        """Restore PyTorch's own functions."""
        CLIPPING.listen(self.optimizers, False)
        for handle in self._handles:
            handle.remove()
        self._patches.remove()

    def record_totals(self) -> None:
        """Add what is known at the end."""
        self.loaders.record_workers()
        try:
            self.last_known.look()
            held = self.optimizers.held
            self.hub.add("totals", "", "", {
                **self.loop.totals(self.last_known.trained(held)),
                **self.last_known.totals(held, self.losses.reached),
                "calls": {m.prefix: m.calls for m in self.models.models.values()},
                "optimizers": [
                    {"number": o.number, "kind": o.kind, "code": o.code, "steps": o.steps}
                    for o in self.optimizers.optimizers.values()
                ],
            })  # fmt: skip
        except Exception as error:
            self.hub.failed("the totals", error)


CONTEXT: Final = TrainingContext()
