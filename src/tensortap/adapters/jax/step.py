"""A function of a step, watched: compiled once more with everything that is wanted as further results.

A step that nobody wants runs the user's own function, and costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax

from tensortap.adapters.jax import kernel
from tensortap.adapters.jax.adapter import JaxAdapter, refuse
from tensortap.adapters.jax.context import CONTEXT
from tensortap.adapters.jax.harvest import Harvester, Item
from tensortap.adapters.jax.intercept import intercepting
from tensortap.adapters.jax.layers import value_of
from tensortap.adapters.jax.operations import Operations
from tensortap.adapters.jax.rules import RULES
from tensortap.adapters.jax.scopes import Scopes
from tensortap.adapters.jax.signature import Layout, Signature
from tensortap.adapters.jax.tag import Mark, tag, watchable
from tensortap.adapters.jax.watcher import Watcher, export
from tensortap.record.recorder import OpenStep


class StepFunction:
    """The user's function under taps: same arguments, same results. `tap` is the tap.

    Leave the `with` block, or call `close`, and it is the function alone.
    """

    def __init__(self, function: Callable[..., Any], adapters: Sequence[JaxAdapter], tap: Any, **options: Any) -> None:
        under = function if isinstance(function, StepFunction) else None
        self.function: Callable[..., Any] = under.function if under else function
        self.adapters: tuple[JaxAdapter, ...] = (*(under.adapters if under else ()), *adapters)
        self.tap = tap
        self._signature: Signature = under._signature if under else Signature(function, **options)
        self._told: set[About] = set()
        self._programs: dict[tuple[int, ...], Callable[..., Any]] = {}
        functools.update_wrapper(self, self.function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step."""
        adapters = [a for a in self.adapters if a.watcher is not None and a.watcher.open]
        with contextlib.ExitStack() as stack:
            for adapter in adapters:
                stack.callback(_watcher(adapter).steps.end)
                _watcher(adapter).steps.begin()
            wanted = [(a, step) for a in adapters if (step := _watcher(a).steps.current()).armed]
            if not wanted:
                return self.function(*args, **kwargs)
            return self._observed(wanted, args, kwargs)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", None) or type(self.function).__name__
        on = "" if self.tap.watched == "function" else f" on {self.tap.watched}"
        return f"<StepFunction {name}{on}: {self.tap.summary()}>"

    def __getattr__(self, name: str) -> Any:
        """What else the user's own function has: `lower`, `trace`, `eval_shape`, `clear_cache`; without taps."""
        function = self.__dict__.get("function")  # not there yet while it is made, copied or unpickled
        if function is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(function, name)
        except AttributeError:
            raise AttributeError(f"neither a watched step nor its function {function!r} has {name!r}") from None

    def also(self, function: Callable[..., Any], **options: Any) -> StepFunction:
        """Another function under the same tap, such as the step of an evaluation."""
        return StepFunction(function, self.adapters, self.tap, **options)

    def close(self) -> None:
        """Close the tap."""
        self.tap.close()

    def __enter__(self) -> StepFunction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _observed(self, wanted: Sequence[tuple[JaxAdapter, OpenStep]], args: Any, kwargs: Any) -> Any:
        layout, donated, kept = self._signature.flatten(args, kwargs)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in (*donated, *kept)):
            self._differentiated(wanted)
            return self.function(*args, **kwargs)
        adapters = tuple(adapter for adapter, _ in wanted)
        outcome, failure = None, None
        try:
            outcome = self._program(adapters)(layout, donated, kept)
        except Exception as error:
            failure = error
        if outcome is None:  # no longer inside `except`: an error of the user's own shall show nothing of ours
            return self._without(wanted, failure, (*donated, *kept), args, kwargs)
        self._note(wanted, outcome)
        layout.update(outcome.about.restore, outcome.state)
        return outcome.about.restore(outcome.results)

    def _note(self, wanted: Sequence[tuple[JaxAdapter, OpenStep]], outcome: Outcome) -> None:
        """Leave what the step gave with those who want it; of a new trace, also what it could not show."""
        new = outcome.about not in self._told
        self._told.add(outcome.about)
        for adapter, step in wanted:
            watcher = _watcher(adapter)
            watcher.pend(step, outcome.about.items, outcome.arrays)
            if new:
                watcher.notes.update(outcome.about.opaque)
                watcher.given.update(outcome.about.given)
                adapter.hint(watcher)

    def _without(self, wanted: Any, error: Exception | None, leaves: Any, args: Any, kwargs: Any) -> Any:
        """The step failed with taps. If it does without, the error was the user's own; otherwise it is counted."""
        if error is not None and any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise error
        results = self.function(*args, **kwargs)
        for adapter, _ in wanted:
            _watcher(adapter).failed("running the step with taps", error or RuntimeError("no outcome"))
        return results

    def _differentiated(self, wanted: Any) -> None:
        for adapter, _ in wanted:
            counters = _watcher(adapter).recorder.counters
            counters.add("unseen_steps")
            counters.warn(
                "differentiated",
                "a watched step was called inside jit, grad or vmap: it runs without taps there (counted as "
                "unseen_steps). Watch the outermost function: tensortap.watch_step(jax.jit(whole_step), model)",
            )

    def _program(self, adapters: tuple[JaxAdapter, ...]) -> Callable[..., Any]:
        key = tuple(_watcher(adapter).number for adapter in adapters)
        if key not in self._programs:
            program = functools.partial(_run, self.function, adapters)
            self._programs[key] = jax.jit(program, static_argnums=0, donate_argnums=1)
        return self._programs[key]


class About(NamedTuple):
    """What is known of a traced step besides its numbers."""

    restore: Any
    items: tuple[Item, ...]
    opaque: dict[str, str]
    given: frozenset[str]

    def __hash__(self) -> int:
        return id(self.restore)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, About) and self.restore is other.restore


class Outcome(NamedTuple):
    """What a watched step gives."""

    results: list[Any]
    state: list[Any]
    arrays: list[Any]
    about: About


def _parts(outcome: Outcome) -> tuple[tuple[Any, ...], About]:
    return outcome[:3], outcome.about


jax.tree_util.register_pytree_node(Outcome, _parts, lambda about, parts: Outcome(parts[0], parts[1], parts[2], about))


def _run(
    function: Callable[..., Any], adapters: Sequence[JaxAdapter], layout: Layout, donated: Any, kept: Any
) -> Outcome:
    """Traced by `jit`: the step, traced with tags, and its tags taken out."""
    restore = layout.restorer()
    watchers = {_watcher(adapter).number: _watcher(adapter) for adapter in adapters}
    given: set[str] = set()

    def flat(donated: Any, kept: Any) -> Any:
        args, kwargs = layout.unflatten(donated, kept)
        for adapter in adapters:
            given.update(_tag_parameters(adapter, (args, kwargs)))
        return restore.flatten(function(*args, **kwargs), (args, kwargs))

    with _tracing(watchers):
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(donated, kept)
    for adapter in adapters:
        adapter.refuse_constants(closed.consts)
    harvester = Harvester(export(watchers), RULES, _operations(watchers), _scopes(adapters))
    leaves, found = harvester.run(closed.jaxpr, closed.consts, jax.tree.leaves((donated, kept)))
    results, state = jax.tree.unflatten(jax.tree.structure(shape), leaves)
    arrays = kernel.packed(found.items, found.arrays)
    return Outcome(results, state, arrays, About(restore, tuple(found.items), harvester.opaque, frozenset(given)))


@contextlib.contextmanager
def _tracing(watchers: dict[int, Watcher]) -> Iterator[None]:
    """Functions inside are traced anew, with tags: what JAX has traced before has none."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(CONTEXT(("tensortap", tuple(watchers))))
        asking = [watcher for watcher in watchers.values() if watcher.late]
        stack.enter_context(intercepting(lambda: asking))
        for watcher in watchers.values():
            watcher.trace(True)
            stack.callback(watcher.trace, False)
        yield


def _operations(watchers: dict[int, Watcher]) -> Operations | None:
    asking = [watcher for watcher in watchers.values() if watcher.operations]
    if not asking:
        return None
    return Operations(lambda *place: [n for watcher in asking for n in watcher.wants_operation(*place)])


def _scopes(adapters: Sequence[JaxAdapter]) -> Scopes | None:
    asking = [_watcher(adapter) for adapter in adapters if adapter.kind in (None, "tree")]
    return Scopes(lambda path: [n for watcher in asking for n in watcher.wants_scope(path)]) if asking else None


def _tag_parameters(adapter: JaxAdapter, arguments: Any) -> list[str]:
    watcher = _watcher(adapter)
    found = [(path, value_of(p)) for path, p in adapter.find(arguments) if watcher.wants(path, "param")]
    for path, value in found:
        if watchable(value):
            tag(value, [Mark(watcher.number, path, "param")])
    return [path for path, _ in found]


def _watcher(adapter: JaxAdapter) -> Watcher:
    assert adapter.watcher is not None
    return adapter.watcher


def watched(
    function: Any, model: Any, probes: Any, watch: Callable[..., Any], options: Any, arguments: Any
) -> StepFunction:
    """Put taps on a function of a step."""
    refuse(function)
    adapter = JaxAdapter(model, live=False)
    chosen = probes or (() if adapter.kind in ("nnx", "equinox", "linen", "haiku") else ("**",))
    return StepFunction(function, [adapter], watch(adapter, *chosen, **options), **arguments)
