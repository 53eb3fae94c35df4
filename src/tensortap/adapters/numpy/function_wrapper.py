"""Replace a plain function, ufunc or partial that an object holds, to observe its calls; it is put back at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tensortap.adapters.numpy.calls import CallHook, run_hooked


class FunctionWrapper:
    """Take the place of a function. It is called, copied and pickled as that function."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.hooks: tuple[CallHook, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function through its hooks."""
        return run_hooked(self.original, self.hooks, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "original":  # asked for before it is set, while a copy is being made
            raise AttributeError(name)
        return getattr(self.original, name)

    def __eq__(self, other: object) -> bool:
        return self.original == (other.original if isinstance(other, FunctionWrapper) else other)

    def __hash__(self) -> int:
        return hash(self.original)

    def __repr__(self) -> str:
        return repr(self.original)

    def __copy__(self) -> Any:
        return copy.copy(self.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.original, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        # A function of the standard library that gives it back: the pickle opens where tensortap is not installed.
        return (copy.copy, (self.original,))
