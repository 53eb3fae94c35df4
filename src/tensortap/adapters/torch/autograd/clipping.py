"""Gradients just before they are clipped by their norm.

`clip_grad_norm_` may have been imported anywhere, but it looks up the function that scales the gradients in its own
module. While there are listeners that name is our function. Clipping by value, and clipping written by hand, have no
such function and are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from torch.compiler import is_compiling
from torch.nn.utils import clip_grad

_NAME: Final = "_clip_grads_with_norm_"  # absent in old versions: then clipping is not seen


class ClippingListener(Protocol):
    """Listen to clipping. No method may raise."""

    def before_clipping(self, parameters: list[Any], most: float, norm: Any) -> None:
        """Act before these parameters' gradients, of this total norm, are scaled to `most` if that is less."""

    def after_clipping(self, parameters: list[Any]) -> None:
        """Act after they have been scaled."""


class Clipping:
    """Replace the function that scales for the first listener, and put it back after the last."""

    def __init__(self) -> None:
        self._listeners: tuple[ClippingListener, ...] = ()
        self._original: Callable[..., Any] | None = None

    def listen(self, listener: ClippingListener, wanted: bool) -> None:
        """Add or remove a listener; doing so again changes nothing."""
        if wanted == any(known is listener for known in self._listeners):
            return
        others = tuple(known for known in self._listeners if known is not listener)
        self._listeners = (*others, listener) if wanted else others
        if self._listeners and self._original is None and hasattr(clip_grad, _NAME):
            self._original = getattr(clip_grad, _NAME)
            setattr(clip_grad, _NAME, self._clip)
        elif not self._listeners and self._original is not None and getattr(clip_grad, _NAME) == self._clip:
            # If another library has replaced our function in turn, its function stays and calls ours.
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
