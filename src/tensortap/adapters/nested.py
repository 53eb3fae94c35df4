"""Find the tensors of one framework inside the arguments or results of a layer, each with a readable slot."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any, Final, TypeVar

_DEPTH: Final = 8
T = TypeVar("T")


def values_in(value: Any, kind: type[T], slot: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, T]]:
    """Yield every value of a kind in tuples, lists, dicts, named tuples and dataclasses (HF's ModelOutput is a dict).

    >>> [slot for slot, _ in values_in((1.0, {"hidden": [2.0]}), float)]
    ['[0]', '[1].hidden[0]']
    """
    if isinstance(value, kind):
        yield slot, value
    elif depth:
        for name, item in items_of(value):
            yield from values_in(item, kind, slot + name, depth - 1)


def items_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in a container or dataclass, each item with the end of its slot."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield (f".{key}" if isinstance(key, str) else f"[{key!r}]"), item
    elif isinstance(value, (tuple, list)):
        names = _field_names(type(value))
        for i, item in enumerate(value):
            yield (f".{names[i]}" if names else f"[{i}]"), item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name, None)


def _field_names(kind: type) -> tuple[str, ...] | None:
    """Return the names of a named tuple's entries, `torch.return_types.max` and its like included."""
    names = getattr(kind, "_fields", None) or (hasattr(kind, "n_fields") and getattr(kind, "__match_args__", None))
    return names or None


def call_with(function: Callable[..., Any], inputs: Any) -> Any:
    """Call a function with one value, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return function(**inputs)
    if isinstance(inputs, tuple):
        return function(*inputs)
    try:
        return function(inputs)
    except TypeError as error:
        if isinstance(inputs, list):
            error.add_note(f"the list was given as one argument: for {len(inputs)} arguments, write a tuple")
        raise


def arguments_in(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type[T]) -> list[tuple[str, T]]:
    """Return the values of a kind that a function is called with, named by its parameters; one alone has none."""
    return arguments_by(names_of(function), args, kwargs, kind)


def arguments_by(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type[T]
) -> list[tuple[str, T]]:
    """Return the values as `arguments_in` does, for names that are known."""
    found = [pair for slot, item in named_arguments(names, args, kwargs) for pair in values_in(item, kind, slot)]
    return [("", found[0][1])] if len(found) == 1 else found


def named_arguments(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the arguments of a function, each with its slot."""
    return [(_slot(names, i), item) for i, item in enumerate(args)] + [(f".{key}", kwargs[key]) for key in kwargs]


def names_of(function: Any) -> tuple[str, ...]:
    """Return the names of what a function takes by position."""
    plain = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(plain, "__code__", None)
    return _positional(code, hasattr(function, "__self__")) if code is not None else ()


def _slot(names: tuple[str, ...], position: int) -> str:
    return f".{names[position]}" if position < len(names) else f"[{position}]"


@lru_cache(maxsize=4096)
def _positional(code: CodeType, bound: bool) -> tuple[str, ...]:
    return code.co_varnames[int(bound) : code.co_argcount]
