"""Compare two models on one batch: record both from one random state, and compare the runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from tensortap.adapters.batches import host_arrays
from tensortap.adapters.lookup import adapter_for, framework_for
from tensortap.adapters.nested import call_with, values_in
from tensortap.adapters.rng import preserve_rng_state
from tensortap.diff import Diff, diff
from tensortap.diff.align import Renaming
from tensortap.errors import UnsupportedError
from tensortap.reduce.reducers import Array, Full, Histogram, Reducer, Sample, Stats
from tensortap.select.ports import NEED_BACKWARD
from tensortap.select.probes import Probe, probe
from tensortap.select.sites import Candidate, Pattern
from tensortap.watch import watch

LARGE: Final = 1 << 18  # elements; a larger tensor is sampled
SAMPLE: Final = 1 << 16
Choice = Probe | str | Pattern | Callable[[Candidate], bool]


@dataclass(frozen=True, slots=True)
class _Small(Full):
    """Keep the whole of a tensor that is not large."""

    def pick(self, array: Array, place: str) -> Array | None:  # type: ignore[override]
        return None if array.size > LARGE else Full.pick(self, array, place)


@dataclass(frozen=True, slots=True)
class _OfLarge(Sample):
    """Keep a sample of a large tensor, at positions that do not depend on the site's name: names may differ."""

    def pick(self, array: Array, place: str) -> Array | None:  # type: ignore[override]
        return Sample.pick(self, array, "") if array.size > LARGE else None

    def __str__(self) -> str:
        return f"Sample(n={self.n}, seed={self.seed}, place='')"

    def describe(self) -> dict[str, Any]:
        return {**Sample.describe(self), "place": ""}


_NO_NAMES: Final = (
    "the function {} named no value that the probes ask for: name the values where they are computed, "
    "tensortap.tap(x, 'name'), or record the model inside it with tensortap.watch and compare runs: tensortap.diff"
)
_TWO_KINDS: Final = (
    "tensortap.compare calls both models with the same batch, and these are of {} and {}: its tensors were handed to "
    "each as its own. Where they do not take the same arguments, record each with its own: with "
    "tensortap.watch(model, tensortap.probe('**', keep=[tensortap.stats(), tensortap.full()]), to='runs/a'), and "
    "compare the runs: tensortap.diff('runs/a', 'runs/b')"
)
KEEP: Final[tuple[Reducer, ...]] = (Stats(), Histogram(), _Small(), _OfLarge(SAMPLE))


def compare(
    model_a: Any, model_b: Any, batch: Any, *probes: Choice, map: Renaming = None,
    rtol: float | None = None, atol: float | None = None,
) -> Diff:  # fmt: skip
    """Call two models with one batch and report the first divergence.

    >>> import torch, tensortap as tt
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
    >>> bool(tt.compare(model, model, torch.ones(2, 4)))
    True

    `batch` is the one argument, a tuple of arguments or a dict of keyword arguments. Without `probes` the outputs of
    all modules and the parameters are compared, element by element (of large tensors a sample); a probe for gradients
    adds a backward pass from the mean of the outputs. Both start from the random state that there is, which afterwards
    is what it was, and so are the models. A function whose values are named with `tap(x, "name")` is a model too.
    Each is called with the same values as arrays of its own, whatever the batch is of, and a function with the batch as
    it is, or else as arrays that it takes; `map` is that of `tensortap.diff`.
    """
    if isinstance(model_a, (str, os.PathLike)) or isinstance(model_b, (str, os.PathLike)):
        paths_given = f"tt.diff({str(model_a)!r}, {str(model_b)!r})"
        given = model_a if isinstance(model_a, (str, os.PathLike)) else model_b
        raise UnsupportedError(f"tt.compare calls two models: each must be one, got {given!r}. For runs {paths_given}")
    with tempfile.TemporaryDirectory(prefix="tensortap-compare-") as folder:
        paths = [f"{folder}/{name}" for name in "ab"]
        models = model_a, model_b
        for i, model in enumerate(models):
            with _explained(*models):
                if _is_model(model):
                    _record(model, _own_batch(model, batch, models), probes, paths[i])
                else:
                    paths[i] = _record_function(model, _kinds(batch, models[1 - i]), probes, paths[i])
        names = (getattr(model, "__name__", type(model).__name__) for model in (model_a, model_b))
        return replace(diff(*paths, map=map, rtol=rtol, atol=atol), a=next(names), b=next(names))


class _AnyArrayType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return hasattr(value, "__array__") and hasattr(value, "dtype")


class _AnyArray(metaclass=_AnyArrayType):
    """A tensor of any framework."""


def _own_batch(model: Any, batch: Any, models: tuple[Any, Any]) -> Any:
    """Return the batch in a form that a model takes: unchanged if models and arrays are of one framework."""
    framework = framework_for(model)
    name = framework.capabilities.name
    kinds = {type(leaf).__module__.partition(".")[0] for _, leaf in values_in(batch, _AnyArray)}
    foreign = any(not kind.startswith(name) for kind in kinds)
    return framework.own_batch(batch) if foreign or len(_frameworks(*models)) > 1 else batch


def _kinds(batch: Any, other: Any) -> Iterator[Any]:
    """Yield the batch in forms that a function may take: unchanged, as NumPy arrays, in the other model's form."""
    yield batch
    yield host_arrays(batch)
    if _is_model(other):
        yield framework_for(other).own_batch(batch)


def _record_function(function: Any, batches: Iterator[Any], probes: Sequence[Choice], path: str) -> str:
    """Record a function, whose framework nothing tells, with the first batch that it takes; return where it is."""
    first: Exception | None = None
    for n, batch in enumerate(batches):
        try:
            _record(function, batch, probes, f"{path}{n}")
        except (TypeError, AttributeError) as error:
            first = first or error
        else:
            return f"{path}{n}"
    assert first is not None
    raise first


def _record(model: Any, batch: Any, probes: Sequence[Choice], path: str) -> None:
    if not _is_model(model):
        with _same_random(), watch(*_chosen(probes, ["**"]), to=path, strict=True) as tap:
            call_with(model, batch)
            if not tap.recorder.current.table.rows:
                raise UnsupportedError(_NO_NAMES.format(getattr(model, "__name__", type(model).__name__)))
            tap.step()
        return
    candidates = adapter_for(model).candidates()
    default = ["**", *(["**:param"] if any("param" in c.ports for c in candidates) else [])]
    chosen = _chosen(probes, default)
    backward = any(pattern.ports & NEED_BACKWARD for p in chosen for pattern in p.patterns)
    isolated = framework_for(model).isolated(model, backward)
    with isolated as run, watch(model, *chosen, to=path, strict=True, fast_path="leave") as tap:
        run(batch)
        tap.step()


@contextmanager
def _explained(model_a: Any, model_b: Any) -> Iterator[None]:
    """Add a note to the error of a model that was called with the other model's kind of batch."""
    try:
        yield
    except Exception as error:
        names = _frameworks(model_a, model_b)
        if len(names) == 2:
            error.add_note(_TWO_KINDS.format(*names))
        raise


def _frameworks(*models: Any) -> list[str]:
    """Return the frameworks of the models, each once."""
    return list(dict.fromkeys(framework_for(model).capabilities.name for model in models if _is_model(model)))


def _is_model(model: Any) -> bool:
    try:
        framework_for(model)
    except UnsupportedError:
        if isinstance(model, type) or not callable(model):
            raise
        return False
    return True


def _chosen(probes: Sequence[Choice], default: Sequence[Choice]) -> list[Probe]:
    """Return the user's probes as they are, and bare patterns as probes that keep elements."""
    given = probes or default
    bare = [item for item in given if not isinstance(item, Probe)]
    return [*([probe(*bare, keep=KEEP)] if bare else []), *(item for item in given if isinstance(item, Probe))]


@contextmanager
def _same_random() -> Iterator[None]:
    """Restore the random state of Python and NumPy at the end."""
    put_back = preserve_rng_state()
    try:
        yield
    finally:
        put_back()
