"""Trace the user's own `tf.function`s with taps while a model is watched; afterwards the old traces are used again.

TensorFlow looks up a trace by its arguments and by a context. While a model is watched, a trace that uses it is looked
up in a context of its own: it is made on the next call, and never found again afterwards, when the old traces are. All
this is private to TensorFlow; in a version that stores traces differently, nothing is changed.

Only functions that use the model are traced again: those whose old trace captures one of its variables, and so those
that call such a function, as captures are handed through. One context for all functions of the process would be less
code, but metrics and other models would be traced and compiled again whenever taps are attached.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from tensortap.record.counters import Counters

NOT_RETRACED: Final = (
    "this version of TensorFlow stores traces in an unknown way, so a tf.function that was traced before "
    "tensortap.watch is not seen: make it afterwards"
)
_COMPILATION: Final = "tensorflow.python.eager.polymorphic_function.tracing_compilation"
_NUMBERS: Final = itertools.count(1)


class TappedScope(NamedTuple):
    """Replace the scope type in the context of traces with taps; `numbers` are those of the watched models."""

    scope_type: Any
    numbers: frozenset[int]


class WatchedModel:
    """One watched model, and the mark that only traces with its taps capture."""

    def __init__(self, model: Any, mark: Any, counters: Counters) -> None:
        self._model = weakref.ref(model)
        self._mark = mark
        self._counters = counters

    def used_by(self, trace: Any) -> bool:
        """Return whether a trace uses it. A model without variables could be used by any trace."""
        try:
            model = self._model()
            own = frozenset() if model is None else _handles(model)
            captured = frozenset(map(id, trace.graph.external_captures))
            return (not own and getattr(model, "built", False)) or not captured.isdisjoint(own | {id(self._mark)})
        except Exception as error:
            self._counters.note("unseen_functions", "looking for a function's variables", error)
            return False


class WatchedModels:
    """The models that are watched at a time, each with the number of its taps."""

    def __init__(self, active: Mapping[WatchedModel, int]) -> None:
        self.active = active
        self.numbers = frozenset(active.values())
        self._known: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()

    def of(self, trace: Any) -> frozenset[int]:
        """Return the numbers of the models that a trace uses."""
        known = self._known.get(trace)
        if known is None:
            known = frozenset(number for watched, number in self.active.items() if watched.used_by(trace))
            self._known[trace] = known
        return known


class TappedCache:
    """Replace a function's cache for one lookup: traces that use watched models are stored separately."""

    def __init__(self, options: Any, models: WatchedModels, added: Callable[[], None]) -> None:
        self._cache = options.function_cache
        self._models = models
        self._added = added
        self._old: Any = None
        self._context: Any = None
        self.options = copy.copy(options)
        self.options.function_cache = self

    def __len__(self) -> int:
        return len(self._cache)

    def lookup(self, wanted: Any, context: Any) -> Any:
        """Return the trace for these arguments; None where one with taps is to be made."""
        old = self._cache.lookup(wanted, context)
        numbers = self._models.numbers if old is None else self._models.of(old)
        if old is not None and not numbers:
            return old
        self._old, self._context = old, context._replace(scope_type=TappedScope(context.scope_type, numbers))
        found = self._cache.lookup(wanted, self._context)
        # Arguments that an old trace took with a wider signature are taken by one with the same signature.
        self.options.reduce_retracing |= found is None and old is not None and old.function_type != wanted
        return found

    def generalize(self, context: Any, wanted: Any) -> Any:
        """Return the signature for the new trace."""
        if self._old is not None:
            return wanted.most_specific_common_subtype([self._old.function_type]) or wanted
        return self._cache.generalize(self._context, self._cache.generalize(context, wanted))

    def add(self, trace: Any, context: Any) -> None:
        """Keep the new trace: like any other if it uses no watched model."""
        if self._old is None and not self._models.of(trace):
            self._cache.add(trace, context)
        else:
            self._cache.add(trace, self._context)
            self._added()


class Retracing:
    """Replace TensorFlow's function that finds or makes traces while any model is watched."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a tap may be closed by the collector of garbage, at any time
        self._models = WatchedModels({})
        self._replacement: Any = None
        self._kept: dict[int, weakref.ref[Any]] = {}  # owners of caches that hold traces with taps

    def join(self, watched: WatchedModel) -> Callable[[], None] | None:
        """Store traces separately from now on; return a function that ends it, or None if this is not possible."""
        with self._lock:
            if not self._models.active:
                if not _as_known():
                    return None
                self._replace()
            self._begin({**self._models.active, watched: next(_NUMBERS)})
        return partial(self._leave, watched)

    def renew(self, watched: WatchedModel) -> None:
        """Trace again: taps were added or removed."""
        with self._lock:
            self._begin({**self._models.active, watched: next(_NUMBERS)})

    def _leave(self, watched: WatchedModel) -> None:
        with self._lock:
            self._begin({other: number for other, number in self._models.active.items() if other is not watched})
            if not self._models.active:
                replacement, self._replacement, module = self._replacement, None, _compilation()
                if module._maybe_define_function is replacement:
                    module._maybe_define_function = replacement.__wrapped__

    def _replace(self) -> None:
        module = _compilation()
        original = module._maybe_define_function

        @functools.wraps(original)
        def define(args: Any, kwargs: Any, tracing_options: Any) -> Any:
            options = tracing_options
            # Whoever replaced it after us may go on calling our function after it was removed.
            if self._replacement is define and options.function_cache is not None:
                options = TappedCache(options, self._models, partial(self._keep, options)).options
            return original(args, kwargs, options)

        module._maybe_define_function = self._replacement = define

    def _begin(self, active: Mapping[WatchedModel, int]) -> None:
        self._models = WatchedModels(active)
        self._sweep()

    def _keep(self, options: Any) -> None:
        self._kept[id(options)] = weakref.ref(options)

    def _sweep(self) -> None:
        """Drop traces that will not be used again. Those of a function in tracing stay until the next time."""
        for key, ref in list(self._kept.items()):
            options = ref()
            lock = options and options.lock
            if lock and not lock.acquire(blocking=False):
                continue
            try:
                if options is None or not _clean(options.function_cache, self._models.numbers):
                    self._kept.pop(key, None)
            finally:
                if lock:
                    lock.release()


def _clean(cache: Any, numbers: frozenset[int]) -> bool:
    """Drop traces whose numbers are not among these; return whether others with taps remain."""
    tapped = [context for context in cache._dispatch_dict if isinstance(context.scope_type, TappedScope)]
    gone = {context for context in tapped if not context.scope_type.numbers <= numbers}
    for context, kind in [key for key in cache._primary if key[0] in gone]:
        cache.delete(kind, context)
    for context in gone:
        del cache._dispatch_dict[context]
    return len(gone) < len(tapped)


def _handles(model: Any) -> frozenset[int]:
    values = [variable._value for variable in model.variables]
    parts = [part for value in values for part in getattr(value, "values", (value,))]  # of a distributed one
    return frozenset(id(part.handle) for part in parts if hasattr(part, "handle"))


def _compilation() -> Any:
    return importlib.import_module(_COMPILATION)


def _as_known() -> bool:
    """Return whether this TensorFlow stores traces in the expected way."""
    try:
        cache = importlib.import_module("tensorflow.core.function.polymorphism.function_cache")
        options = _compilation().TracingOptions
        names = _compilation()._maybe_define_function.__code__.co_varnames[:3]
    except (ImportError, AttributeError):
        return False
    return (
        names[-1:] == ("tracing_options",)
        and {"_primary", "_dispatch_dict"} <= set(cache.FunctionCache.__slots__)
        and all(hasattr(cache.FunctionCache, name) for name in ("lookup", "add", "generalize", "delete"))
        and cache.FunctionContext._fields == ("context", "scope_type")
        and {"function_cache", "reduce_retracing", "lock"} <= set(options.__dataclass_fields__)
    )


RETRACING: Final = Retracing()
