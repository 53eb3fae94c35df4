"""Observe the layers of scikit-learn's multilayer perceptrons, which are iterations of a loop and not objects.

Each iteration ends by calling an activation function from one dict, in place. While such a model is watched inside, the
functions in that dict are wrapped: called by a watched model, they show the layer before and after activation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tensortap.adapters.numpy.calls import THREAD, CallHook
from tensortap.adapters.numpy.function_wrapper import FunctionWrapper

_BASE: Final = "BaseMultilayerPerceptron"
_LOCK: Final = threading.Lock()
_INSIDE: dict[int, tuple[MLPTaps, ...]] = {}
_USERS: dict[int, int] = {}  # of each dict of activations, by its id


def is_mlp(value: Any) -> bool:
    """Return whether it is one of scikit-learn's perceptrons."""
    return any(c.__name__ == _BASE and c.__module__.startswith("sklearn.") for c in type(value).__mro__)


def layers_in(mlp: Any) -> list[tuple[str, str]]:
    """Return the names of its layers and of their activations."""
    sizes = mlp.hidden_layer_sizes
    hidden = 1 if isinstance(sizes, int) else len(sizes)
    last = getattr(mlp, "out_activation_", "output")
    return [*((f"hidden.{i}", mlp.activation) for i in range(hidden)), ("out", last)]


class _NextLayer(threading.local):
    number = 0


class MLPTaps:
    """Observe the layers of one perceptron for one tap, with a hook or None for each."""

    def __init__(self, mlp: Any, hooks: Sequence[CallHook | None]) -> None:
        self.hooks = tuple(hooks)
        self._key = id(mlp)
        self._activations: dict[str, Any] = _activations(mlp)
        self._next = _NextLayer()

    def attach(self) -> None:
        """Wrap the activation functions."""
        with _LOCK:
            _INSIDE[self._key] = (*_INSIDE.get(self._key, ()), self)
            users = _USERS[id(self._activations)] = _USERS.get(id(self._activations), 0) + 1
            if users == 1:
                for name, function in self._activations.items():
                    self._activations[name] = _Activation(function)

    def detach(self) -> None:
        """Restore the activation functions when no tap needs them any more."""
        with _LOCK:
            rest = tuple(other for other in _INSIDE.pop(self._key, ()) if other is not self)
            if rest:
                _INSIDE[self._key] = rest
            _USERS[id(self._activations)] -= 1
            if not _USERS[id(self._activations)]:
                del _USERS[id(self._activations)]
                for name, function in self._activations.items():
                    if isinstance(function, _Activation):
                        self._activations[name] = function.original

    def next_hook(self) -> CallHook | None:
        """Return the hook of the next layer."""
        number = self._next.number
        self._next.number = (number + 1) % len(self.hooks)
        return self.hooks[number]

    def begin(self) -> None:
        """Begin with the first layer."""
        self._next.number = 0

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin with the first layer."""
        self.begin()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model's own function."""
        return function

    def after(self, output: Any) -> None:
        """Do nothing."""

    def ended(self) -> None:
        """Do nothing."""


class _Activation(FunctionWrapper):
    """Wrap an activation function, which changes its argument and returns nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        owners = THREAD.owners
        inside = _INSIDE.get(id(owners[-1]), ()) if owners else ()
        hooks = [hook for each in inside if (hook := each.next_hook()) is not None]
        for hook in hooks:
            hook.before(self.original, args[:1], {})
        output = self.original(*args, **kwargs)
        for hook in hooks:
            hook.after(args[0])
        return output


def _activations(mlp: Any) -> dict[str, Any]:
    """Return the dict in which the model's class looks up its functions."""
    owner = next(cls for cls in type(mlp).__mro__ if cls.__name__ == _BASE)
    found: dict[str, Any] = sys.modules[owner.__module__].ACTIVATIONS
    return found
