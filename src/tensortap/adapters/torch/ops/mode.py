"""The function mode that observes operations, and how it is pushed and popped without disturbing other modes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import torch
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from tensortap.adapters.torch.ops.dispatch import OPAQUE
from tensortap.reduce import kernel as kernels

_MOST_FUNCTIONS: Final = 8192  # some libraries make a new one for every call
_depth: Final = torch._C._len_torch_function_stack
_at: Final = torch._C._get_function_stack_at
_push: Final = torch._C._push_on_torch_function_stack
_pop: Final = torch._C._pop_torch_function_stack
STACK: Final = (_push, _pop)  # the functions of PyTorch that C needs


class OperationListener(Protocol):
    """Decide which operations to observe, and observe them."""

    def wants(self, function: Callable[..., Any]) -> str | None:
        """Return the operation's name if any probe may want it. Asked once for each function."""

    def observe(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function, record its inputs and outputs, and return its result."""


class OpMode(TorchFunctionMode):
    """Intercept every PyTorch function that the thread calls; a dict tells whether it is wanted."""

    def __init__(
        self, listener: OperationListener, known: dict[Any, str | None], known_to_c: dict[Any, str | None]
    ) -> None:
        super().__init__()
        self.listener = listener
        self.known = known
        self.known_to_c = known_to_c  # those of them that C may call

    def use_c(self, reader: kernels.Reader, state: kernels.RunningCalls) -> None:
        """Let C handle calls, and call this class's method for those that it cannot."""
        if kernels.ModeCall is not None:
            python = self.__torch_function__
            native = kernels.ModeCall(reader, self, python, self.known_to_c, self.listener, state)
            vars(self)["__torch_function__"] = native
            state.mode = self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_compiling():
            return func(*args, **(kwargs or {}))
        try:
            name = self.known.get(func, "")
            if name == "":
                name = self._decide(func)
        except TypeError:  # the callable is not hashable
            name = None
        if name is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return self.listener.observe(name, func, args, kwargs or {})

    def _decide(self, function: Any) -> str | None:
        name = self.listener.wants(function)
        if not getattr(function, "__closure__", None) or str(function.__module__).startswith("torch"):
            if len(self.known) >= _MOST_FUNCTIONS:
                self.known.clear()
                self.known_to_c.clear()
            self.known[function] = name  # not a closure, which may hold tensors
            if function not in OPAQUE:
                self.known_to_c[function] = name
        return name

    def activate(self, above: int | None = None) -> None:
        """Push the mode on this thread's stack: on top, or above the given number of modes."""
        if above is None:
            _push(self)
            return
        others = [_pop() for _ in range(_depth() - above)]
        for mode in (self, *reversed(others)):
            _push(mode)

    def deactivate(self) -> None:
        """Remove the mode. Modes that the user has pushed since stay where they are."""
        if self.is_on_top():
            _pop()
            return
        others = []
        while _depth() and (mode := _pop()) is not self:
            others.append(mode)
        for mode in reversed(others):
            _push(mode)

    def is_on_top(self) -> bool:
        """Return whether it is active, and no mode was pushed since."""
        depth = _depth()
        return depth > 0 and _at(depth - 1) is self


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Pop all function modes of this thread for the block: the user's modes must not see a repeated run."""
    taken = [_pop() for _ in range(_depth())]
    try:
        yield
    finally:
        for mode in reversed(taken):
            _push(mode)


def depth() -> int:
    """Return how many modes are active in this thread."""
    return _depth()


def only_ours() -> bool:
    """Return whether all active modes of this thread are ours, so that without them there would be none."""
    return all(isinstance(_at(i), OpMode) for i in range(_depth()))
