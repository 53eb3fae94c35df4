"""An array whose operations are observed: `@`, ufuncs and NumPy's functions, and those on their results.

Values, dtype and memory are those of the plain array: it is a view of it. It misses arrays that pass `np.asarray` or a
list, and operations among arrays that were not given to the layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

_REDUCTIONS: Final = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}


class LayerCall(Protocol):
    """One call of a layer, for one tap."""

    def observe(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], Any]) -> Any:
        """Run an operation and record it."""


class _LayerCalls(threading.local):
    """The layers' calls that run in a thread, for each tap outermost first. Operations belong to the innermost."""

    def __init__(self) -> None:
        self.stacks: dict[int, list[LayerCall]] = {}


LAYER_CALLS: Final = _LayerCalls()


class Traced(np.ndarray):
    """A view whose operations are observed."""

    plain: Any = None  # the very array it is a view of, for those that were given to a layer

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run a ufunc: `@`, `+` and NumPy's elementwise functions call this."""
        name = ufunc.__name__ if method == "__call__" else _REDUCTIONS.get(ufunc.__name__, f"{ufunc.__name__}_{method}")
        more = {**strip(kwargs), **({} if out is None else {"out": strip(out)})}
        result = _observed(name, strip(inputs), more, getattr(ufunc, method))
        if out is not None:
            return out[0] if len(out) == 1 else out
        return wrap(result)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run one of NumPy's other functions."""
        result = _observed(function.__name__, strip(args), strip(kwargs), function)
        return kwargs["out"] if isinstance(kwargs.get("out"), np.ndarray) else wrap(result)

    def dot(self, other: Any, out: Any = None) -> Any:
        """Run `np.dot`, which the method of an array does not call."""
        return np.dot(self, other) if out is None else np.dot(self, other, out=out)

    def __reduce__(self) -> Any:
        return strip(self).__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return strip(self).__deepcopy__(memo)


def wrap(value: Any) -> Any:
    """Return a value with the arrays in it, also in tuples, lists and dicts, as traced ones."""
    if type(value) is np.ndarray:
        traced = value.view(Traced)
        traced.plain = value
        return traced
    return _mapped(value, wrap)


def strip(value: Any) -> Any:
    """Return a value with plain arrays again; arrays that came in are returned as the same objects."""
    if isinstance(value, Traced):
        return value.view(np.ndarray) if value.plain is None else value.plain
    return _mapped(value, strip)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with its items changed; itself when none was."""
    if isinstance(value, (tuple, list)) and (type(value) in (tuple, list) or hasattr(value, "_make")):
        items: Any = [change(item) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if type(value) is dict:
        items = {key: change(item) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in value) else items
    return value


def _observed(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], function: Callable[..., Any]) -> Any:
    run: Callable[[], Any] = partial(function, *args, **kwargs)
    for calls in list(LAYER_CALLS.stacks.values()):
        run = partial(calls[-1].observe, name, args, kwargs, run)
    return run()
