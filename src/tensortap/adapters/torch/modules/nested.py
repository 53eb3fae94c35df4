"""Find the tensors inside what a module takes or returns, each with a readable slot.

Values of any type are searched: containers, dataclasses and other objects, by their `__dict__` and `__slots__`. No
property, descriptor or method of an object runs. Classes that have neither are entered by their pytree registration.
What cannot be entered is reported by type. An object that is given to several modules in a step, such as a cache, is
looked into where it is given first: else every layer would read all of it.

torch.compile traces containers and dataclasses; other objects are reported by type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from tensortap.adapters.nested import arguments_by, arguments_in, items_of, named_arguments, names_of, values_in

_DEPTH: Final = 8
_MOST_OBJECTS: Final = 512  # entered in one value
_SCALARS: Final = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_EMPTY: Final = frozenset((object, *_SCALARS))  # exactly these classes; a bare object holds nothing
_WITHOUT_TENSORS: Final = (
    *_SCALARS, bytearray, range, slice, type, enum.Enum, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, types.ModuleType, functools.partial, weakref.ref, weakref.ProxyType,
    np.ndarray, np.generic, np.dtype, torch.Generator, torch.layout, torch.memory_format, nn.Module,
    type(threading.Lock()), type(threading.RLock()),
)  # fmt: skip
_HEAP_TYPE: Final = 1 << 9
Items = Callable[[Any], Iterable[tuple[str, Any]]]


def tensors_in(value: Any, not_entered: Callable[[type], None] | None = None) -> list[tuple[str, Tensor]]:
    """Return every tensor in a value, at most eight levels deep. `not_entered` is told types that stay closed.

    >>> import torch
    >>> [slot for slot, _ in tensors_in((torch.ones(1), {"hidden": [torch.ones(2)]}))]
    ['[0]', '[1].hidden[0]']
    >>> [slot for slot, _ in tensors_in(types.SimpleNamespace(mean=torch.ones(1), name="x"))]
    ['.mean']
    """
    search = _Search(not_entered or _ignore)
    search.look_into(value, "", _DEPTH)
    return search.found


def tensors_in_containers(value: Any, slot: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in tuples, lists, dicts, named tuples and dataclasses: what torch.compile can trace."""
    return values_in(value, Tensor, slot)


def objects_in_containers(value: Any, depth: int = _DEPTH) -> list[str]:
    """Return the classes of the objects that `tensors_in_containers` does not enter. torch.compile can trace it."""
    if isinstance(value, (Tensor, *_WITHOUT_TENSORS)):
        return []
    if not (isinstance(value, (Mapping, tuple, list)) or dataclasses.is_dataclass(value)):
        return [f"{type(value).__module__}.{type(value).__qualname__}"]
    return [name for _, item in items_of(value) for name in objects_in_containers(item, depth - 1)] if depth else []


def inputs_in(forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the tensors a module was called with, in containers and dataclasses."""
    return arguments_in(forward, args, kwargs, Tensor)


def object_inputs_in(
    forward: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], objects: GivenObjects
) -> list[tuple[str, Tensor]]:
    """Return the tensors in the other objects that a module was called with."""
    if all(isinstance(value, (Tensor, *_SCALARS)) for value in (*args, *kwargs.values())):
        return []
    search = _Search(objects.not_entered, objects)
    for slot, value in named_arguments(names_of(forward), args, kwargs):
        search.look_into(value, slot, _DEPTH)
    return search.found_in_objects


def inputs_by(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the same where the parameter names are known."""
    return arguments_by(names, args, kwargs, Tensor)


class GivenObjects:
    """The objects that modules were given in the open step. It keeps none of them alive."""

    __slots__ = ("_seen", "_step", "given_again", "not_entered")

    def __init__(self, not_entered: Callable[[type], None], given_again: Callable[[], None]) -> None:
        self.not_entered = not_entered
        self.given_again = given_again
        self._seen: dict[int, weakref.ref[Any]] = {}
        self._step: object = None

    def begin(self, step: object) -> None:
        """Forget what was given in another step."""
        if step is not self._step:
            self._step = step
            self._seen = {}

    def is_first(self, value: Any) -> bool:
        """Return whether an object is seen for the first time; True for every object without weak references."""
        known = self._seen.get(id(value))
        if known is not None and known() is value:
            self.given_again()
            return False
        with contextlib.suppress(TypeError):
            self._seen[id(value)] = weakref.ref(value)
        return True


class _Search:
    """One search through a value; objects are entered once, so that cycles end."""

    __slots__ = ("entered", "found", "found_in_objects", "given", "inside", "not_entered")

    def __init__(self, not_entered: Callable[[type], None], given: GivenObjects | None = None) -> None:
        self.found: list[tuple[str, Tensor]] = []
        self.found_in_objects: list[tuple[str, Tensor]] = []  # but not in dataclasses alone
        self.entered: set[int] = set()
        self.inside = 0  # how many such objects are entered here
        self.not_entered = not_entered
        self.given = given

    def look_into(self, value: Any, slot: str, depth: int) -> None:
        kind: Any = type(value)
        if isinstance(value, Tensor):
            (self.found_in_objects if self.inside else self.found).append((slot, value))
        elif kind not in _EMPTY:
            items, is_object = _items_by_type(kind)
            if items is None:
                if is_object:
                    self.not_entered(kind)
            elif is_object:
                self._enter(value, slot, depth, items)
            elif depth:
                for name, item in items(value):
                    self.look_into(item, slot + name, depth - 1)

    def _enter(self, value: Any, slot: str, depth: int, items: Items) -> None:
        if id(value) in self.entered:
            return
        if not depth or len(self.entered) >= _MOST_OBJECTS:
            self.not_entered(type(value))
            return
        counts = self.given is not None and not dataclasses.is_dataclass(value)
        if counts and self.given is not None and not self.inside and not self.given.is_first(value):
            return
        self.entered.add(id(value))
        self.inside += counts
        for name, item in list(items(value)):
            self.look_into(item, slot + name, depth - 1)
        self.inside -= counts


@functools.lru_cache(maxsize=1024)
def _items_by_type(kind: Any) -> tuple[Items | None, bool]:
    """Return how values of a class are entered, and whether they are objects and not containers."""
    if issubclass(kind, _WITHOUT_TENSORS):
        return None, False
    if issubclass(kind, (Mapping, tuple, list)):
        return items_of, False
    if dataclasses.is_dataclass(kind):
        return functools.partial(_stored, [field.name for field in dataclasses.fields(kind)]), True
    classes = [cls for cls in kind.__mro__ if cls.__flags__ & _HEAP_TYPE]  # C types have members that are not slots
    slots = [name for cls in classes for name, held in vars(cls).items() if type(held) is types.MemberDescriptorType]
    if kind.__dictoffset__ or slots:
        return functools.partial(_attributes, slots), True
    registered = _pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        return functools.partial(_flattened, registered.flatten_fn), True
    return None, True


def _stored(names: list[str], value: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes that are stored in the object itself: in its `__dict__` or in a slot."""
    stored = vars(value) if type(value).__dictoffset__ else {}
    for name in names:
        if name in stored:
            yield f".{name}", stored[name]
        elif type(getattr(type(value), name, None)) is types.MemberDescriptorType:
            try:
                yield f".{name}", object.__getattribute__(value, name)
            except AttributeError:
                continue  # a slot that was never filled


def _attributes(slots: list[str], value: Any) -> Iterator[tuple[str, Any]]:
    stored = vars(value) if type(value).__dictoffset__ else {}
    return _stored([*slots, *(name for name in stored if isinstance(name, str))], value)


def _flattened(flatten: Callable[[Any], tuple[list[Any], Any]], value: Any) -> Iterator[tuple[str, Any]]:
    for i, child in enumerate(flatten(value)[0]):
        yield f"[{i}]", child


def _ignore(kind: type) -> None:
    pass
