"""The functions that `fit`, `evaluate` and `predict` call for every step: seen by the host, and traced with taps.

Keras keeps them in attributes of the model and traces them once. A stepper stands in for one: the first call makes it
anew, with what is watched now; the function that was there before, with all its traces, is given back at the end.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Final

from tensortap.adapters.keras.standins import Around, StandIn, join

# The attribute, the method that fills it, and the phase that its steps are in.
KINDS: Final = (
    ("train_function", "make_train_function", "train"),
    ("test_function", "make_test_function", "eval"),
    ("predict_function", "make_predict_function", "predict"),
)


class Stepper:
    """Stands in for one of the three functions."""

    def __init__(self, model: Any, kind: str, maker: str) -> None:
        self._model = weakref.ref(model)
        self._kind = kind
        self._maker = maker
        self.saved = vars(model).get(kind)
        self.inner: Any = None
        self.arounds: tuple[Around, ...] = ()

    def __call__(self, *args: Any) -> Any:
        """One step, or as many as Keras takes at once."""
        if self.inner is None:
            self.inner = self.make()
            object.__setattr__(self._model(), self._kind, self)
        call = self.inner
        for around in self.arounds:
            call = functools.partial(around, call)
        return call(*args)

    def make(self) -> Any:
        """A new function, by Keras's own method, which puts it into the attribute."""
        model = self._model()
        method = getattr(model, self._maker)
        (method.original if isinstance(method, StandIn) else method)(force=True)
        return vars(model)[self._kind]

    def change(self, arounds: tuple[Around, ...]) -> None:
        """Other watchers: the next call traces anew. With none left, what was there before is given back."""
        self.arounds, self.inner = arounds, None
        model = self._model()
        if arounds or model is None or vars(model).get(self._kind) is not self:
            return
        if self.saved is not None:
            object.__setattr__(model, self._kind, self.saved)
        else:  # `fit` may be running, and must find a function; it is traced when it is first called
            self.make()


def watch(model: Any, around: Callable[[str], Around]) -> list[Callable[[], None]]:
    """See every call of the three functions; what takes each watcher away again."""
    undo: list[Callable[[], None]] = []
    for kind, maker, phase in KINDS:
        if hasattr(model, maker):
            undo += _watch_one(model, kind, maker, around(phase))
    return undo


def _watch_one(model: Any, kind: str, maker: str, seen: Around) -> list[Callable[[], None]]:
    def made(call: Any, force: bool = False) -> Any:
        stepper = _stepper(model, kind, maker)
        if seen not in stepper.arounds or force:
            stepper.change((*(other for other in stepper.arounds if other is not seen), seen))
        call(force=False)  # the others that watch; in the end Keras's own method, which finds a function and is content
        return stepper

    def leave() -> None:
        unmake()
        stepper = vars(model).get(kind)
        if isinstance(stepper, Stepper) and seen in stepper.arounds:
            stepper.change(tuple(other for other in stepper.arounds if other is not seen))

    unmake = join(model, maker, made)
    if vars(model).get(kind) is not None:
        made(lambda force: None)
    return [leave]


def _stepper(model: Any, kind: str, maker: str) -> Stepper:
    held = vars(model).get(kind)
    if not isinstance(held, Stepper):
        held = Stepper(model, kind, maker)
        object.__setattr__(model, kind, held)
    return held
