"""The function mode that sees operations, and how it goes on and off a thread without disturbing other modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

_MOST_FUNCTIONS: Final = 8192  # some libraries make a new one for every call
_depth: Final = torch._C._len_torch_function_stack
_at: Final = torch._C._get_function_stack_at
_push: Final = torch._C._push_on_torch_function_stack
_pop: Final = torch._C._pop_torch_function_stack


class OperationListener(Protocol):
    """Who looks at the operations."""

    def wants(self, function: Callable[..., Any]) -> str | None:
        """The operation's name if any probe may want it, wherever it runs. Asked once for each function."""

    def observe(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, look at what goes in and comes out, and give back what it returned."""


class OpMode(TorchFunctionMode):
    """Sees every function of PyTorch's that the thread calls; whether it is wanted is one look into a dict."""

    def __init__(self, listener: OperationListener, known: dict[Any, str | None]) -> None:
        super().__init__()
        self.listener = listener
        self.known = known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_compiling():
            return func(*args, **(kwargs or {}))
        try:
            name = self.known.get(func, "")
            if name == "":
                name = self._decide(func)
        except TypeError:  # a callable of somebody's that cannot be a key
            name = None
        if name is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.listener.observe(name, func, args, kwargs or {})

    def _decide(self, function: Any) -> str | None:
        name = self.listener.wants(function)
        if not getattr(function, "__closure__", None) or str(function.__module__).startswith("torch"):
            if len(self.known) >= _MOST_FUNCTIONS:
                self.known.clear()
            self.known[function] = name  # not of a closure, which may hold tensors
        return name

    def on(self, above: int | None = None) -> None:
        """See what this thread calls from now on: above all modes there are, or above so many of them."""
        others = [] if above is None else [_pop() for _ in range(_depth() - above)]
        for mode in (self, *reversed(others)):
            _push(mode)

    def off(self) -> None:
        """See no more. Modes that the user has put on since stay where they are."""
        others = []
        while _depth() and (mode := _pop()) is not self:
            others.append(mode)
        for mode in reversed(others):
            _push(mode)

    def on_top(self) -> bool:
        """Whether it is on, and no mode was put on since."""
        return bool(_depth()) and _at(_depth() - 1) is self


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """While this lasts, no function mode is on in this thread: what is run again is none of the user's doing."""
    taken = [_pop() for _ in range(_depth())]
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push(mode)


def depth() -> int:
    """How many modes are on in this thread."""
    return _depth()


def only_ours() -> bool:
    """Whether every mode that is on in this thread is one of ours: without them, PyTorch would see none."""
    return all(isinstance(_at(i), OpMode) for i in range(_depth()))
