"""How the framework and the adapter for a model are found. A framework is imported when a model of it is given."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from tensortap.adapters.advice import advice_for
from tensortap.adapters.protocol import DEFAULT_OPTIONS, Adapter, AdapterOptions, Framework
from tensortap.adapters.registry import BY_MODULE, BY_NAME, FRAMEWORKS, Registered, registered_for
from tensortap.distributed.ranks import World, of_environment
from tensortap.errors import ProbeError, UnsupportedError
from tensortap.record.counters import Counters
from tensortap.record.pending import PendingMetrics, PendingNumber

_A_STEP: Final = "; or watch a step of JAX: step = tensortap.watch_step(step, params)"


def load(registered: Registered) -> Framework:
    """Import a framework's package and return its object."""
    found: Framework = importlib.import_module(f"{__package__}.{registered.name}.framework").FRAMEWORK
    return found


def framework_named(name: str) -> Framework:
    """Return a framework by the name of its package."""
    return load(BY_NAME[name])


def framework_of(value: Any) -> Framework | None:
    """Return the framework that one of a value's classes comes from."""
    found = registered_for(value)
    return None if found is None else load(found)


def framework_for(model: Any) -> Framework:
    """Return the framework that can watch a model; raise if there is none."""
    if isinstance(model, type):
        name = model.__name__
        raise UnsupportedError(
            f"a class cannot be watched: a model must be an object, got the class {name}. Make an instance: {name}(...)"
        )
    if (found := framework_of(model)) is not None:
        return found
    for framework in (load(each) for each in FRAMEWORKS if each.plain_objects):
        if framework.recognizes(model):
            return framework
    raise UnsupportedError(_unknown(model))


def adapter_for(model: Any, options: AdapterOptions = DEFAULT_OPTIONS) -> Adapter:
    """Return the adapter for a model or a plain function; an adapter stands for itself."""
    if isinstance(model, Adapter):
        return model
    if inspect.isroutine(model) or isinstance(model, functools.partial):
        return _for_function(model, options)
    found = framework_for(model).adapter(model, options)
    if found is None:
        raise UnsupportedError(_unknown(model))
    return found


def world_now(rank: int | None = None) -> World:
    """Return which of several processes this is: what the user says, or a framework in use, or the launcher."""
    said = (framework.world() for framework in _in_use("global_stats"))
    now = next(filter(None, said), None) or of_environment()
    return now if rank is None else World(rank, max(now.size, rank + 1))


def compiled_values(see: Callable[[Any, str], object]) -> Callable[[Any, str], bool] | None:
    """Return what sees named values in compiled code of the frameworks in use; True: it is compiled, and seen to."""
    return next(filter(None, (framework.compiled_values(see) for framework in _in_use("compiled"))), None)


def numbers_in(metrics: Mapping[str, Any], counters: Counters) -> Mapping[str, float]:
    """Return the numbers in metrics; those on a device are not waited for. A metric of None is left out.

    A value that is not a number is counted and warned of, and with `strict` raised: it must not end a training.
    """
    numbers: dict[str, Any] = {}
    pending = False
    for name, value in metrics.items():
        # Mostly it is a float, and no framework has to be asked.
        number = value if type(value) is float else _number_in(name, value, counters)
        if number is not None:
            numbers[name] = number
            pending = pending or type(number) is PendingNumber
    return PendingMetrics(numbers) if pending else numbers


def _number_in(name: str, value: Any, counters: Counters) -> float | PendingNumber | None:
    if value is None:
        return None
    framework = framework_of(value)
    try:
        return float(value) if framework is None else framework.number(value)
    except OverflowError:
        counters.add("overflowed_metrics")
        counters.warn(f"overflow:{name}", f"metric {name!r} is too large for a float and is recorded as infinite")
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError) as error:
        refused = ProbeError(
            f"metric {name!r} must be a number, got {value!r} ({error}); write step({name}=float(...))"
        )
    if counters.strict:
        raise refused
    counters.add("refused_metrics")
    counters.warn(f"metric:{name}", f"{refused} (left out, and counted as refused_metrics)")
    return None


def _in_use(feature: str) -> Iterator[Framework]:
    return (load(each) for each in FRAMEWORKS if each.in_use and each.capabilities.gives(feature))


def _for_function(function: Any, options: AdapterOptions) -> Adapter:
    """Return the adapter for a plain function's operations, where a framework in use can show them.

    A `tf.function` looks like a routine too, but its operations are none of theirs: there is advice for it.
    """
    if not advice_for(function):
        for framework in _in_use("blocks"):
            return framework.function_adapter(function, options)
    raise UnsupportedError(_unknown(function))


def _unknown(model: Any) -> str:
    if advice := advice_for(model):
        return f"an object of type {type(model).__name__} cannot be watched: {advice}"
    return (
        f"an object of type {type(model).__name__} cannot be watched: there is no adapter for it (there are some for "
        f"models of {', '.join(BY_MODULE)}, and for objects whose layers are callables). Name values instead: "
        f"with tensortap.watch(): tensortap.tap(x, 'name'){_A_STEP if 'jax' in sys.modules else ''}"
    )
