"""The models that are called: their names, modes and batches, as events."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import nn

from tensortap.adapters.torch.context.batches import fingerprint, tensors_in
from tensortap.adapters.torch.context.caller import user_line
from tensortap.adapters.torch.context.definitions import Definitions, functions_in
from tensortap.adapters.torch.context.loader_events import LoaderEvents
from tensortap.adapters.torch.context.loop import LoopState
from tensortap.adapters.torch.context.losses import describe
from tensortap.adapters.torch.context.models import ModelRecord, grad_mode
from tensortap.adapters.torch.context.plain import is_plain
from tensortap.adapters.torch.context.sink import EventHub, guarded
from tensortap.adapters.torch.samples.monitor import SampleMonitor
from tensortap.context.caller import frames_of_caller
from tensortap.context.origins import callers, frames_of_user, input_lines

_MOST_LINES: Final = 400
_MOST_TOKENS: Final = 1 << 20
_MOST_SHIFT: Final = 2  # positions that labels may be before or behind the tokens


class ModelEvents:
    """Every model of the process that is watched."""

    def __init__(
        self, hub: EventHub, loop: LoopState, loaders: LoaderEvents, definitions: Definitions, samples: SampleMonitor
    ) -> None:
        self.hub = hub
        self._definitions = definitions
        self._samples = samples
        self.models: dict[int, ModelRecord] = {}
        self._loop = loop
        self._loaders = loaders
        self._called: dict[int, ModelRecord] = {}
        self._named: dict[int, tuple[str, weakref.ref[Any]]] = {}
        self._tokens: torch.Tensor | None = None

    @guarded
    def add_model(self, root: nn.Module, prefix: str, called: nn.Module | None = None) -> None:
        """Learn the names of a model's parameters; `called` is what the user calls, such as a wrapper of it."""
        if id(root) in self.models and self.models[id(root)].root() is root:
            return
        record = self.models[id(root)] = ModelRecord(root, prefix)
        self._called[id(root if called is None else called)] = record
        for name, parameter in record.parameters():
            self._named[id(parameter)] = (name, weakref.ref(parameter))
        self.hub.add("model", prefix, "", record.describe() | self._defined(record, root))

    def _defined(self, record: ModelRecord, root: nn.Module) -> dict[str, Any]:
        """Return the lines that make the model's modules and parameters, by name."""
        modules = ((record.name(path), self._definitions.line_of(m)) for path, m in root.named_modules())
        parameters = self._definitions.of_parameters(root)
        return {
            "lines": dict([(path, line) for path, line in modules if line][:_MOST_LINES]),
            "parameter_lines": {record.name(name): line for name, line in [*parameters.items()][:_MOST_LINES]},
            "functions": functions_in(root),
        }

    @guarded
    def model_called(self, root: nn.Module, inputs: Any) -> None:
        """Note a call of a model from outside: its mode and its inputs."""
        record = self._called.get(id(root))
        if record is None:
            return
        self._samples.model_called(inputs)
        mode = record.note_call(root.training, grad_mode())
        n = record.calls[mode] - 1
        looked_at = n < 16 or n % 32 < 2
        if not inputs and looked_at:
            inputs = arguments_of_call()
        if record.has_tables:
            self._tokens = self._tokens_in(inputs) if looked_at else None
        self._loop.called(record.prefix, mode, record.has_modes)
        if mode != record.mode:
            first, record.mode = record.mode is None, mode
            code = user_line(3)
            if first or self.hub.due(("mode", record.prefix, mode), first=4, then=64):
                self.hub.add("mode", record.prefix, code, {
                    "mode": mode, "callers": callers(), **record.describe_mode()
                })  # fmt: skip
        if looked_at:
            self._note_batch(record, mode, n, inputs)

    def _tokens_in(self, inputs: Any) -> torch.Tensor | None:
        """Return a copy of a batch's tokens; None where there are two sequences, such as a source and a target.

        A copy, because a script may keep no reference to a slice that it made for the call.
        """
        found = [t for t in list(tensors_in(inputs))[:6] if t.dtype is torch.int64 and t.dim() == 2 and is_plain(t)]
        if not found or any(_is_other_sequence(found[0], other) for other in found[1:]):
            return None
        return found[0].detach().clone() if found[0].numel() <= _MOST_TOKENS else None

    def tokens(self) -> torch.Tensor | None:
        """Return the last tokens that a model was called with, (sample, position), among the calls that were
        examined.
        """
        return self._tokens

    def padding(self) -> int | None:
        """Return the index of padding, if all embeddings that have one agree."""
        found = {record.padding for record in self.models.values()} - {None}
        return found.pop() if len(found) == 1 else None

    def _note_batch(self, record: ModelRecord, mode: str, n: int, inputs: Any) -> None:
        known = fingerprint(inputs)
        drawn = self._loaders.samples_in(inputs)
        data: dict[str, Any] = {"mode": mode, "fingerprint": known, "call": n, **drawn}
        first = next(tensors_in(inputs), None)
        if first is not None:
            data["input"] = describe(first)
        if n == 0 and not mode.endswith("no_grad"):
            data["origins"] = input_lines(frames_of_user())
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


def _is_other_sequence(tokens: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether a tensor holds other tokens: no mask, no positions, no labels that are the tokens again.

    Labels may be the tokens of other positions, for example if a script shifts labels that the model shifts too.
    """
    if int(other.max()) <= 1 or bool((other[:1] == other).all()):
        return False
    if len(other) != len(tokens) or abs(other.shape[1] - tokens.shape[1]) > _MOST_SHIFT:
        return True
    return not any(_are_same(tokens, other, shift) for shift in range(-_MOST_SHIFT, _MOST_SHIFT + 1))


def _are_same(tokens: torch.Tensor, other: torch.Tensor, shift: int) -> bool:
    """Return whether one tensor equals the other, shifted by this many positions, except at ignored labels."""
    a, b = tokens[:, max(0, shift) :], other[:, max(0, -shift) :]
    width = min(a.shape[1], b.shape[1])
    a, b = a[:, :width], b[:, :width]
    return bool(((b == a) | (b < 0)).all()) and bool((b >= 0).any())


def arguments_of_call() -> tuple[Any, ...]:
    """Return the keyword arguments of the running call of a module that has no positional ones; labels last."""
    for frame in frames_of_caller(3)[:12]:
        if frame.f_code.co_name == "_call_impl" and (given := frame.f_locals.get("kwargs")):
            return tuple(given[name] for name in sorted(given, key=lambda name: "label" in name or "target" in name))
    return ()
