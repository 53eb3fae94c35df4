"""The models that are called: their names, modes and batches, as events."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from tensortap.adapters.torch.context.batches import fingerprint
from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.loader_events import LoaderEvents
from tensortap.adapters.torch.context.loop import LoopState
from tensortap.adapters.torch.context.losses import describe
from tensortap.adapters.torch.context.models import ModelRecord, grad_mode
from tensortap.adapters.torch.context.sink import EventHub, guarded


class ModelEvents:
    """Every model of the process that is watched."""

    def __init__(self, hub: EventHub, loop: LoopState, loaders: LoaderEvents) -> None:
        self.hub = hub
        self.models: dict[int, ModelRecord] = {}
        self._loop = loop
        self._loaders = loaders
        self._called: dict[int, ModelRecord] = {}
        self._named: dict[int, tuple[str, weakref.ref[Any]]] = {}

    @guarded
    def add_model(self, root: nn.Module, prefix: str, called: nn.Module | None = None) -> None:
        """Learn the names of a model's parameters; `called` is what the user calls, such as a wrapper of it."""
        if id(root) in self.models and self.models[id(root)].root() is root:
            return
        record = self.models[id(root)] = ModelRecord(root, prefix)
        self._called[id(root if called is None else called)] = record
        for name, parameter in record.parameters():
            self._named[id(parameter)] = (name, weakref.ref(parameter))
        self.hub.add("model", prefix, "", record.describe())

    @guarded
    def model_called(self, root: nn.Module, inputs: Any) -> None:
        """Note a call of a model from outside: its mode, and what it was given."""
        record = self._called.get(id(root))
        if record is None:
            return
        mode = record.note_call(root.training, grad_mode())
        self._loop.called(record.prefix, mode, record.has_modes)
        if mode != record.mode:
            first, record.mode = record.mode is None, mode
            code = user_line(3)
            if first or self.hub.due(("mode", record.prefix, mode), first=4, then=64):
                self.hub.add("mode", record.prefix, code, {"mode": mode, **record.describe_mode()})
        self._note_batch(record, mode, inputs)

    def _note_batch(self, record: ModelRecord, mode: str, inputs: Any) -> None:
        n = record.calls[mode] - 1
        if not (n < 16 or n % 32 < 2):
            return
        known = fingerprint(inputs)
        drawn = self._loaders.samples_in(inputs)
        data: dict[str, Any] = {"mode": mode, "fingerprint": known, "call": n, **drawn}
        first = inputs[0] if isinstance(inputs, (list, tuple)) and inputs else inputs
        if isinstance(first, torch.Tensor):
            data["input"] = describe(first)
        self.hub.add("batch", record.prefix, user_line(4) if n < 2 else "", data)

    def name_of(self, parameter: Any) -> str | None:
        """Return the name of a parameter of a known model."""
        known = self._named.get(id(parameter))
        return known[0] if known is not None and known[1]() is parameter else None

    def path_of(self, module: nn.Module) -> str:
        """Return the name of a module of a known model; empty where it has none."""
        for record in self.models.values():
            root = record.root()
            found = () if root is None else (path for path, known in root.named_modules() if known is module)
            for path in found:
                return record.name(path)
        return ""

    def trainable(self) -> dict[str, Any]:
        """Return the parameters of all models that may be trained, by name."""
        return {
            name: p
            for record in self.models.values()
            for name, p in record.parameters()
            if p.requires_grad and p.dtype.is_floating_point
        }
