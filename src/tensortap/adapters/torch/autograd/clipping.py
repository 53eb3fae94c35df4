"""Gradients just before they are clipped by their norm.

`clip_grad_norm_` may have been imported anywhere, but it looks up the function that scales the gradients in its own
module. While somebody listens, and no longer, that name leads through here. Clipping by value, and clipping written
by hand, have no such place and are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from torch.compiler import is_compiling
from torch.nn.utils import clip_grad

_NAME: Final = "_clip_grads_with_norm_"  # absent in old versions: then clipping is not seen


class Listener(Protocol):
    """Is told of clipping. What it raises is its own affair: it must not."""

    def before_clipping(self, parameters: list[Any], most: float, norm: Any) -> None:
        """These parameters' gradients, of this norm in all, are about to be scaled to `most` if that is less."""

    def after_clipping(self, parameters: list[Any]) -> None:
        """They have been."""


class Clipping:
    """Puts the detour in for the first listener, and takes it out after the last."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()
        self._original: Callable[..., Any] | None = None

    def listen(self, listener: Listener, wanted: bool) -> None:
        """Begin or end to tell a listener; asked again, it changes nothing."""
        others = tuple(known for known in self._listeners if known is not listener)
        self._listeners = (*others, listener) if wanted else others
        if self._listeners and self._original is None and hasattr(clip_grad, _NAME):
            self._original = getattr(clip_grad, _NAME)
            setattr(clip_grad, _NAME, self._clip)
        elif not self._listeners and self._original is not None and getattr(clip_grad, _NAME) == self._clip:
            # Where somebody has put a detour of their own over ours, it stays, and passes everything on.
            setattr(clip_grad, _NAME, self._original)
            self._original = None

    def _clip(self, parameters: Any, max_norm: float, total_norm: Any, *rest: Any, **more: Any) -> Any:
        original: Any = self._original
        listeners = () if is_compiling() else self._listeners
        if not listeners:
            return original(parameters, max_norm, total_norm, *rest, **more)
        given = parameters if isinstance(parameters, list) else [parameters]
        for listener in listeners:
            listener.before_clipping(given, float(max_norm), total_norm)
        result = original(parameters, max_norm, total_norm, *rest, **more)
        for listener in listeners:
            listener.after_clipping(given)
        return result


CLIPPING: Final = Clipping()
