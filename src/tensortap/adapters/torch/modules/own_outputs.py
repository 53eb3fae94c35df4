"""Find the modules that compute beyond what they call, and watch their outputs too.

A block that adds its input to what its layers returned computes; an nn.Sequential returns what its last layer
returned. Only a call tells them apart: until a module's first observed call has returned, temporary hooks note the
storages of what it is given and of what the modules in it return, each with the version that in-place operations
count. A module that returns any other tensor computes itself. The notes keep no tensor's memory alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from tensortap.adapters.torch.modules.hooks import Hook, is_tracing
from tensortap.adapters.torch.modules.hookset import Register, may_fuse, new_hook_key, register_after, register_before
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.modules.tensors import without_torch_function

EncoderLayer = nn.TransformerEncoderLayer
Version = tuple[StorageWeakRef, int]
OutputAction = Callable[[nn.Module, Any, Any], None]
_NOTHING: Final[Mapping[str, Any]] = {}
_weak_reference: Final[Callable[[Any], StorageWeakRef]] = StorageWeakRef


class UndecidedModule:
    """A module that may or may not compute by itself: that is not known yet.

    `inside` are the paths of what it calls; `watch` records its output, and from then on that of every call.
    """

    __slots__ = ("bits", "inside", "is_open", "layers", "path", "watch")

    def __init__(
        self, path: str, inside: list[str], layers: list[EncoderLayer], bits: int, watch: OutputAction
    ) -> None:
        self.path = path
        self.inside = inside
        self.layers = [weakref.ref(layer) for layer in layers]  # what may run fused in it
        self.bits = bits
        self.watch = watch
        self.is_open = True

    def hides_calls(self) -> bool:
        """Return whether a layer in it may have run fused, without the hooks that would have noted its output."""
        return any((layer := known()) is not None and may_fuse(layer) for known in self.layers)


class OwnOutputs:
    """The modules of a model that are undecided, and the temporary hooks that decide."""

    def __init__(self, undecided: list[UndecidedModule]) -> None:
        self.notes = OutputNotes()
        self.undecided = undecided
        self.changed = bool(undecided)
        self._keys = new_hook_key(), new_hook_key()

    @property
    def bits(self) -> int:
        """The probes that want outputs by default."""
        return self.undecided[0].bits if self.undecided else 0

    def settle(self) -> None:
        """Between two calls of the model: leave out what was decided, and what runs only in parts.

        A module that was not called although modules in it were is never called itself.
        """
        ran = self.notes.ran
        rest = [each for each in self.undecided if each.is_open and ran.isdisjoint(each.inside)]
        self.changed |= len(rest) < len(self.undecided)
        self.undecided = rest
        self.notes.clear()

    def hooks(self) -> Iterator[tuple[str, list[Register]]]:
        """Yield the paths that need temporary hooks, with the functions that register them."""
        self.changed = False
        before, after = self._keys
        paths = {each.path for each in self.undecided}
        for each in self.undecided:
            yield (
                each.path,
                [
                    partial(register_before, hook=NoteInputHook(self.notes), key=before),
                    partial(register_after, hook=DecidingHook(self.notes, each), key=after),
                ],
            )
        for path in {path for each in self.undecided for path in each.inside} - paths:
            yield path, [partial(register_after, hook=NoteOutputHook(self.notes, path), key=after)]


class OutputNotes:
    """The tensors that modules were given and returned in this call of the model, by storage."""

    def __init__(self) -> None:
        self.ran: set[str] = set()
        self._versions: dict[StorageWeakRef, int] = {}

    def add(self, value: Any) -> None:
        """Note every tensor in a value."""
        self._versions.update(_versions(value))

    def lack_some_of(self, value: Any) -> bool:
        """Return whether a value holds a tensor that was not noted, or was changed since."""
        return any(self._versions.get(storage) != version for storage, version in _versions(value))

    def clear(self) -> None:
        """Forget everything."""
        self.ran.clear()
        self._versions.clear()


def _versions(value: Any) -> list[Version]:
    with without_torch_function():
        return [_version(tensor) for _, tensor in tensors_in(value)]


def _version(tensor: Tensor) -> Version:
    """Return a tensor's storage and how often it was changed; raises where there is no storage (vmap, sparse)."""
    storage: StorageWeakRef = _weak_reference(tensor.untyped_storage())
    return storage, 0 if tensor.is_inference() else tensor._version


class NoteInputHook(Hook):
    """Note the inputs of an undecided module."""

    __slots__ = ("notes",)

    def __init__(self, notes: OutputNotes) -> None:
        self.notes = notes

    def __call__(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any] = _NOTHING) -> None:
        """Note the inputs."""
        if not is_compiling() and not is_tracing():
            _if_possible(self.notes.add, (args, kwargs))


class NoteOutputHook(Hook):
    """Note the outputs of a module inside an undecided module."""

    __slots__ = ("notes", "path")

    def __init__(self, notes: OutputNotes, path: str) -> None:
        self.notes = notes
        self.path = path

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note the output."""
        if not is_compiling() and not is_tracing():
            self.notes.ran.add(self.path)
            _if_possible(self.notes.add, output)


class DecidingHook(Hook):
    """Decide, when a module's call returns, whether it computes; note its output for the modules around it."""

    __slots__ = ("notes", "undecided")

    def __init__(self, notes: OutputNotes, undecided: UndecidedModule) -> None:
        self.notes = notes
        self.undecided = undecided

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Decide once."""
        if is_compiling() or is_tracing():
            return
        self.notes.ran.add(self.undecided.path)
        can_tell = self.undecided.is_open and not self.undecided.hides_calls()
        computes = _if_possible(self.notes.lack_some_of, output) if can_tell else None
        _if_possible(self.notes.add, output)
        if computes is not None:
            self.undecided.is_open = False
            if computes:
                self.undecided.watch(module, args, output)


def _if_possible(act: Callable[[Any], Any], value: Any) -> Any:
    """Return None where a tensor has no storage to go by, as under vmap: the next call may tell."""
    try:
        return act(value)
    except (RuntimeError, NotImplementedError, TypeError):
        return None
