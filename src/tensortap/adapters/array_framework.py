"""Quick looks for every framework whose values are NumPy arrays or can be converted to them.

A framework says how a model is called, what a call can change and what a tap could leave behind; capturing,
verifying, comparing and locating a NaN are then the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from tensortap.adapters.arrays import Array, ArrayAdapter, ArrayCatcher, ArrayObserver, arrays_in, same
from tensortap.adapters.batches import copied
from tensortap.adapters.locate import locate
from tensortap.adapters.nested import call_with
from tensortap.adapters.protocol import DEFAULT_OPTIONS, AdapterOptions, Framework
from tensortap.adapters.results import Captured, ModelIdentity, Origin
from tensortap.adapters.verification import VerificationSubject
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.reduce.graph_rows import Reduced
from tensortap.select.ports import OP_PORTS
from tensortap.select.probes import as_probes
from tensortap.select.sites import Candidate, Pattern

Restore = Callable[[], None]
_ALL_OPERATIONS: Final = "op:*"


class ArrayFramework(Framework):
    """Declare a framework: define `array_adapter`, and override those small methods that it needs."""

    def array_adapter(self, model: Any) -> ArrayAdapter | None:
        """Return the adapter for a model, or None for other objects of the framework."""
        raise NotImplementedError

    def call(self, model: Any, inputs: Any) -> Any:
        """Call a model with one value, a tuple of arguments or a dict of keyword arguments."""
        return call_with(model, inputs)

    @contextmanager
    def preserved(self, model: Any) -> Iterator[Restore]:
        """Yield a function that puts back whatever a call changes; call it at the end."""
        yield lambda: None

    def finished(self, value: Any) -> Any:
        """Wait until the result of a call is ready, and return it."""
        return value

    def on_host(self, value: Any) -> Any:
        """Return a nested value whose tensors are converted to NumPy arrays."""
        return value

    def state(self, model: Any) -> dict[str, Array]:
        """Return the arrays that a model holds, by name."""
        return {}

    def identity(self, model: Any) -> ModelIdentity:
        """Return the arrays that a model holds."""
        return ModelIdentity(self.state(model))

    def traces(self, model: Any) -> dict[str, Any]:
        """Return the state in which leftovers of a tap would show."""
        return {}

    def adapter(self, model: Any, options: AdapterOptions = DEFAULT_OPTIONS) -> ArrayAdapter | None:
        """Return the adapter for a model. The options are ignored: they concern fused layers, which these frameworks
        lack.
        """
        return self.array_adapter(model)

    def capture(self, model: Any, inputs: Any, patterns: Sequence[Any]) -> Captured:
        """Call the model once and return copies of the arrays at the chosen sites."""
        found = Captured()
        recorder = Recorder(as_probes(patterns))
        found.output = self._call_with_taps(model, inputs, ArrayCatcher(recorder, found))
        return found

    def sites_of_call(self, model: Any, inputs: Any, sites: Sequence[Candidate]) -> list[Candidate]:
        """Call the model once and add its single operations, where they are seen in a call."""
        adapter = self._adapter(model)
        try:
            adapter.refuse(Pattern.parse(_ALL_OPERATIONS))
        except UnsupportedError:
            return list(sites)
        lister = _Lister(Recorder(as_probes([_ALL_OPERATIONS])))
        with self.preserved(model):
            self._call_with_taps(model, copied(inputs, _copy_array), lister)
        return [*sites, *(Candidate(site, (op,), OP_PORTS) for site, op in lister.places.items())]

    def locate_nonfinite(self, model: Any, batch: Any) -> Origin | None:
        """Run one step and return the first layer that made something not finite."""
        with self.preserved(model):
            return locate(self._adapter(model), self.as_step(model, batch))

    @contextmanager
    def isolated(self, model: Any, backward: bool) -> Iterator[Callable[[Any], object]]:
        """Yield a function that calls the model with a batch. Gradients are refused where probes ask for them."""
        with self.preserved(model):
            yield lambda batch: self.call(model, copied(batch, _copy_array))

    @contextmanager
    def verification(self, model: Any, batch: Any) -> Iterator[VerificationSubject]:
        """Yield the subject of a verification."""
        step = self.as_step(model, batch)
        with self.preserved(model) as restore:
            yield ArraySubject(self, model, step, restore)

    def as_step(self, model: Any, batch: Any) -> Callable[[], Any]:
        """Return the user's own function of a step, or a call of the model."""
        return batch if callable(batch) else lambda: self.call(model, copied(batch, _copy_array))

    def _adapter(self, model: Any) -> ArrayAdapter:
        found = self.array_adapter(model)
        if found is None:
            title, kind = self.capabilities.title, type(model).__name__
            raise UnsupportedError(f"the model must be a model of {title}, got an object of type {kind}")
        return found

    def _call_with_taps(self, model: Any, inputs: Any, observer: ArrayObserver) -> Any:
        adapter = self._adapter(model)
        adapter.attach(observer.recorder, adapter.plan(observer.recorder.probes), observer)
        adapter.steps.explicit = True
        try:
            return self.finished(self.call(model, inputs))
        finally:
            adapter.detach()


class ArraySubject(VerificationSubject):
    """A model of a framework whose values are arrays."""

    def __init__(self, framework: ArrayFramework, model: Any, step: Callable[[], Any], restore: Restore) -> None:
        self._framework = framework
        self._model = model
        self._step = step
        self._restore = restore

    def observe(self) -> dict[str, Array]:
        """Return a run's outputs, and the arrays that the model holds after it."""
        self.prepare()
        output = self._framework.on_host(self._step())
        seen = {f"output{slot}": array.copy() for slot, array in arrays_in(output)}
        return seen | self._framework.state(self._model)

    def prepare(self) -> None:
        """Put the state back."""
        self._restore()

    def run(self) -> None:
        """Run once."""
        self._framework.on_host(self._step())

    def traces(self) -> dict[str, Any]:
        """Return what a tap could leave behind."""
        return self._framework.traces(self._model)

    def same(self, a: Array, b: Array) -> bool:
        """Return whether two arrays are equal bit for bit."""
        return same(a, b)

    def apart(self, a: Array, b: Array) -> Any:
        """Return the largest difference of two elements."""
        return np.abs(a.astype(np.complex128) - b).max() if a.shape == b.shape else "?"


class _Lister(ArrayObserver):
    """Note the names of the operations that run."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self.places: dict[str, str] = {}

    def take(self, point: Point, array: Array | Reduced, step: OpenStep, recomputed: bool = False) -> None:
        if point.probes and point.place.op:
            self.places.setdefault(point.place.site, point.place.op)


def _copy_array(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else None
