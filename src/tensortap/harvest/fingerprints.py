"""Fingerprints: what tells one model, data set or option from another, in another process and on another day."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Final

import numpy as np

from tensortap.harvest.batch import TensorLike, array_of_object, arrays_of_object, as_array
from tensortap.harvest.rows import Array
from tensortap.reduce.kernel import hash_bytes

_WHOLE: Final = 1 << 24  # elements of an array that are hashed; of a larger one so many, evenly spaced
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")
_DEPTH: Final = 8
_PLAIN: Final = frozenset({type(None), str, bytes, bool, int, float, complex})


def fingerprint_of_options(options: Mapping[str, Any]) -> str:
    """Return a hash of the options that decide the bytes."""
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()[:16]


def fingerprint_of_arrays(head: str, arrays: Mapping[str, Array]) -> str:
    """Return a hash of names, shapes, types and values; of a very large array evenly spaced elements."""
    digest = hashlib.sha256(head.encode())
    for name in sorted(arrays):
        digest.update(f"{name}{_told_array(arrays[name])}".encode())
    return digest.hexdigest()[:16]


def fingerprint_of_samples(head: str, samples: list[Any]) -> str:
    """Return a hash of samples or batches: of the arrays in them, and of everything else that they hold.

    >>> fingerprint_of_samples("", [{"x": np.ones(2)}]) == fingerprint_of_samples("", [{"x": np.ones(2)}])
    True
    """
    digest = hashlib.sha256(head.encode())
    for sample in samples:
        digest.update("".join(_told(sample, _told_object, _DEPTH)).encode())
    return digest.hexdigest()[:16]


def fingerprint_of_function(function: Callable[..., Any]) -> str:
    """Return a function's name with a hash of its source and of the plain values that it is bound to.

    Those are the arguments of a `functools.partial`, defaults, and what a closure holds. Objects other than numbers,
    text, arrays and containers of these count by their class alone: they may change while they are used.
    """
    told = "".join(_told(function, _told_class, _DEPTH))
    return f"{_name(function)} {hashlib.sha256(told.encode()).hexdigest()[:12]}"


def _told(value: Any, other: Callable[[Any], str], depth: int) -> Iterator[str]:
    """Yield text that says what a value holds; `other` does it for objects that are none of the usual."""
    if _is_plain(value) or (isinstance(value, (list, tuple)) and all(map(_is_plain, value))):
        yield f"{value!r};"
    elif isinstance(value, TensorLike):
        yield _told_array(as_array(value))
    elif not depth:
        yield _told_class(value)
    elif isinstance(value, (Mapping, list, tuple, Set)):
        yield f"{type(value).__qualname__}("
        for item in _items(value):
            yield from _told(item, other, depth - 1)
        yield ")"
    elif isinstance(value, functools.partial) or inspect.isroutine(value):
        yield from _told_function(value, depth - 1)
    else:
        yield other(value)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        return (part for pair in value.items() for part in pair)
    return iter(sorted(value, key=repr) if isinstance(value, Set) else value)


def _told_function(function: Any, depth: int) -> Iterator[str]:
    bound: list[Any] = []
    while isinstance(function, functools.partial):
        bound += [function.args, function.keywords]
        function = function.func
    bound += [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)]
    bound += [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    yield f"{_name(function)}:{_source(function)}"
    yield from _told(bound, _told_class, depth)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name of the function around it that is not bound yet
        return False


def _source(function: Any) -> str:
    """Return a function's source; where there is none, as at a prompt, its code and constants."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return "" if code is None else _ADDRESS.sub("", f"{code.co_code!r}{code.co_names}{code.co_consts}")


def _told_array(array: Array) -> str:
    few = np.ascontiguousarray(np.ascontiguousarray(array).reshape(-1)[:: max(1, array.size // _WHOLE)])
    if few.dtype.hasobject:
        return f"{array.shape}{few.tolist()!r}"
    return f"{array.shape}{array.dtype}{hash_bytes(few.ctypes.data, few.nbytes)}"


def _told_object(value: Any) -> str:
    """What an object is as an array, or the arrays in it; and how it prints, but for where it lies in memory."""
    arrays = {"": found} if (found := array_of_object(value)) is not None else arrays_of_object(value)
    return f"{_told_class(value)}{fingerprint_of_arrays('', arrays)}{_ADDRESS.sub('', repr(value))}"


def _told_class(value: Any) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__};"


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))
