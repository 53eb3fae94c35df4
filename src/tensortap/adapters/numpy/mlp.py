"""The layers inside scikit-learn's multilayer perceptrons, which are no objects but turns of a loop.

Each turn ends by calling an activation function out of one dict, in place. While such a model is watched inside, the
functions in that dict are stand-ins: called by a watched model, they show the layer before and after activation.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tensortap.adapters.numpy.calls import THREAD, Hook
from tensortap.adapters.numpy.slots import Slot

_BASE: Final = "BaseMultilayerPerceptron"
_LOCK: Final = threading.Lock()
_INSIDE: dict[int, tuple[Inside, ...]] = {}
_USERS: dict[int, int] = {}  # of each dict of activations, by its id


def is_mlp(value: Any) -> bool:
    """Whether it is one of scikit-learn's perceptrons."""
    return any(c.__name__ == _BASE and c.__module__.startswith("sklearn.") for c in type(value).__mro__)


def layers_in(mlp: Any) -> list[tuple[str, str]]:
    """The names of its layers and of their activations."""
    sizes = mlp.hidden_layer_sizes
    hidden = 1 if isinstance(sizes, int) else len(sizes)
    last = getattr(mlp, "out_activation_", "output")
    return [*((f"hidden.{i}", mlp.activation) for i in range(hidden)), ("out", last)]


class Inside:
    """Sees the turns of one perceptron for one tap: a hook (or none) for each layer."""

    def __init__(self, mlp: Any, hooks: Sequence[Hook | None]) -> None:
        self.hooks = tuple(hooks)
        self._key = id(mlp)
        self._activations: dict[str, Any] = _activations(mlp)
        self._turns = threading.local()

    def attach(self) -> None:
        """Put the stand-ins in."""
        with _LOCK:
            _INSIDE[self._key] = (*_INSIDE.get(self._key, ()), self)
            users = _USERS[id(self._activations)] = _USERS.get(id(self._activations), 0) + 1
            if users == 1:
                for name, function in self._activations.items():
                    self._activations[name] = _Activation(function)

    def detach(self) -> None:
        """Take them out when nobody needs them any more."""
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

    def turn(self) -> Hook | None:
        """The hook of the layer whose turn it is."""
        number = getattr(self._turns, "number", 0)
        self._turns.number = (number + 1) % len(self.hooks)
        return self.hooks[number]

    def begin(self) -> None:
        """A call of the model begins: so does its first layer."""
        self._turns.number = 0

    def before(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """So it does."""
        self.begin()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The model's own function."""
        return function

    def after(self, output: Any) -> None:
        """Nothing to do."""

    def ended(self) -> None:
        """Nothing to do."""


class _Activation(Slot):
    """Stands in for an activation function, which changes what it is given and returns nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frames = THREAD.frames
        inside = _INSIDE.get(id(frames[-1]), ()) if frames else ()
        hooks = [hook for each in inside if (hook := each.turn()) is not None]
        for hook in hooks:
            hook.before(self.original, args[:1], {})
        output = self.original(*args, **kwargs)
        for hook in hooks:
            hook.after(args[0])
        return output


def _activations(mlp: Any) -> dict[str, Any]:
    """The dict that the model's class looks its functions up in."""
    owner = next(cls for cls in type(mlp).__mro__ if cls.__name__ == _BASE)
    found: dict[str, Any] = sys.modules[owner.__module__].ACTIVATIONS
    return found
