"""Receive the events of all parts of the context, and keep their errors from the training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tensortap.context.events import EventLog, Sampling

P = ParamSpec("P")
is_tracing = torch._C._is_tracing
dispatch_modes = torch._C._len_torch_dispatch_stack
hidden = torch._C.DisableTorchFunction


class EventHub:
    """The logs of all taps, and the sampling of calls that are examined."""

    def __init__(self) -> None:
        self.active = False
        self.logs: list[tuple[EventLog, object]] = []
        self._sampling: dict[Any, Sampling] = {}

    def add(self, kind: str, name: str, code: str, data: dict[str, Any]) -> None:
        """Add an event to every log, once."""
        for log in {id(log): log for log, _ in self.logs}.values():
            log.add(kind, name, code, data)

    def due(self, key: Any, **how: int) -> bool:
        """Count a call of this kind; return whether to examine it."""
        known = self._sampling.get(key)
        if known is None:
            known = self._sampling[key] = Sampling(**how)
        return known.due()

    def failed(self, where: str, error: Exception) -> None:
        """End the context: something of ours does not work here."""
        self.active = False
        self.add("failed", type(error).__name__, "", {"message": str(error)[:500], "where": where})

    def begin(self) -> None:
        """Reset the counts."""
        self.active = True
        self._sampling = {}


class HasHub(Protocol):
    """Base of the listeners that add events."""

    hub: EventHub


S = TypeVar("S", bound=HasHub)


@contextmanager
def unseen() -> Iterator[None]:
    """Hide our operations on tensors from the user's modes and tensor subclasses."""
    with torch._C.DisableTorchFunction():
        if torch._C._len_torch_dispatch_stack():
            with _disable_current_modes():
                yield
        else:
            yield


def guarded(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Keep our errors from the training: on an error the context ends, and the logs say why."""

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        hub = self.hub
        if not hub.active or is_tracing():
            return
        try:
            if dispatch_modes():
                with unseen():
                    method(self, *args, **kwargs)
            else:  # as nearly always, without a context manager written in Python
                with hidden():
                    method(self, *args, **kwargs)
        except Exception as error:
            hub.failed(method.__name__, error)

    return call
