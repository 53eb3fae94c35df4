"""Standing in for methods of one object, so that watchers see its calls; gone without a trace when the last one goes.

Attributes are set past Keras's own tracking, so a stand-in is no part of the model: `save`, `clone_model` and
`deepcopy` do not carry it away.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

Around = Callable[..., Any]
_LOCK: Final = threading.Lock()


class StandIn:
    """Calls the method through everything that was put around it, the first one innermost."""

    def __init__(self, original: Callable[..., Any], own: bool) -> None:
        self.original = original
        self.own = own  # whether the object itself held it, rather than its class
        self.arounds: tuple[Around, ...] = ()
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One call of the method."""
        call = self.original
        for around in self.arounds:
            call = functools.partial(around, call)
        return call(*args, **kwargs)


def join(owner: Any, name: str, around: Around) -> Callable[[], None]:
    """Put a function `around(call, *args, **kwargs)` around a method of one object; what takes it away again."""
    with _LOCK:
        held = vars(owner).get(name)
        if not isinstance(held, StandIn):
            held = StandIn(getattr(owner, name), name in vars(owner))
            object.__setattr__(owner, name, held)
        held.arounds = (*held.arounds, around)
    return functools.partial(_leave, owner, name, held, around)


def _leave(owner: Any, name: str, standin: StandIn, around: Around) -> None:
    with _LOCK:
        standin.arounds = tuple(other for other in standin.arounds if other is not around)
        if standin.arounds or vars(owner).get(name) is not standin:  # or somebody keeps a wrapper of theirs there
            return
        if standin.own:
            object.__setattr__(owner, name, standin.original)
        else:
            object.__delattr__(owner, name)
