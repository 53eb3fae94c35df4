"""Wrap a method of one object so that several hooks see its calls; the last hook to leave restores the method.

Attributes are set without Keras's own tracking, so a wrapper is not part of the model: `save`, `clone_model` and
`deepcopy` do not copy it.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Final

CallHook = Callable[..., Any]
"""Called as `hook(call, *args, **kwargs)` in place of a method; calls `call` itself."""
_LOCK: Final = threading.Lock()


class MethodWrapper:
    """Call a method through its hooks, the first one innermost."""

    def __init__(self, original: Callable[..., Any], own: bool) -> None:
        self.original = original
        self.own = own  # whether the object itself held it, rather than its class
        self.hooks: tuple[CallHook, ...] = ()
        functools.update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        return through(self.hooks, self.original)(*args, **kwargs)


def through(hooks: tuple[CallHook, ...], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another through hooks, the first one innermost."""
    for hook in hooks:
        call = functools.partial(hook, call)
    return call


def wrap_method(owner: Any, name: str, hook: CallHook) -> Callable[[], None]:
    """Put a hook around a method of one object; return what removes it."""
    with _LOCK:
        held = vars(owner).get(name)
        if not isinstance(held, MethodWrapper):
            held = MethodWrapper(getattr(owner, name), name in vars(owner))
            object.__setattr__(owner, name, held)
        held.hooks = (*held.hooks, hook)
    return functools.partial(_remove, owner, name, held, hook)


def _remove(owner: Any, name: str, wrapper: MethodWrapper, hook: CallHook) -> None:
    with _LOCK:
        wrapper.hooks = tuple(other for other in wrapper.hooks if other is not hook)
        if wrapper.hooks or vars(owner).get(name) is not wrapper:  # or another library has wrapped it again meanwhile
            return
        if wrapper.own:
            object.__setattr__(owner, name, wrapper.original)
        else:
            object.__delattr__(owner, name)
