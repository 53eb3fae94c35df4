"""A watched step function: compiled again, and returning everything that probes want as further results.

A step that no probe wants runs the user's own function, and costs nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple

import jax

from tensortap.adapters.jax import kernel
from tensortap.adapters.jax.adapter import JaxAdapter, refuse_step
from tensortap.adapters.jax.extract import ExtractedValue, TagExtractor
from tensortap.adapters.jax.extract_rules import RULES
from tensortap.adapters.jax.intercept import intercepting
from tensortap.adapters.jax.layers import value_of
from tensortap.adapters.jax.operations import JaxOperations
from tensortap.adapters.jax.scopes import NameScopes
from tensortap.adapters.jax.selection import export
from tensortap.adapters.jax.signature import CallLayout, Signature
from tensortap.adapters.jax.tag import Mark, tag, watchable
from tensortap.adapters.jax.tap import JaxTap
from tensortap.adapters.jax.trace_context import CONTEXT
from tensortap.errors import UnsupportedError
from tensortap.record.recorder import OpenStep

_NOT_COMPILABLE: Final = (
    "jax.jit cannot compile the step, which runs without taps: {} Name what Python needs with static_argnums=…, write "
    "control flow with jax.lax, or watch the model where it is called: tensortap.watch(model)"
)


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
        self._reported: set[TraceInfo] = set()
        self._programs: dict[tuple[int, ...], Callable[..., Any]] = {}
        functools.update_wrapper(self, self.function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step."""
        adapters = [a for a in self.adapters if a.tap is not None and a.tap.open]
        with contextlib.ExitStack() as stack:
            for adapter in adapters:
                stack.callback(_tap_of(adapter).steps.end)
                _tap_of(adapter).steps.begin()
            wanted = [(a, step) for a in adapters if (step := _tap_of(a).steps.current()).armed]
            if not wanted:
                return self.function(*args, **kwargs)
            return self._observed(wanted, args, kwargs)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", None) or type(self.function).__name__
        on = "" if self.tap.watched == "function" else f" on {self.tap.watched}"
        return f"<StepFunction {name}{on}: {self.tap.summary()}>"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's own function (`lower`, `trace`, `clear_cache`, …), without taps."""
        function = self.__dict__.get("function")  # not there yet while it is made, copied or unpickled
        if function is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(function, name)
        except AttributeError:
            raise AttributeError(f"neither a watched step nor its function {function!r} has {name!r}") from None

    def also(self, function: Callable[..., Any], **options: Any) -> StepFunction:
        """Return another function under the same tap, such as the step of an evaluation."""
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
            self._count_nested(wanted)
            return self.function(*args, **kwargs)
        adapters = tuple(adapter for adapter, _ in wanted)
        outcome, failure = None, None
        try:
            outcome = self._program(adapters)(layout, donated, kept)
        except Exception as error:
            failure = error
        # Python needs the value of something that was traced
        if isinstance(failure, TypeError) and self._signature.fix_numbers():
            return self._observed(wanted, args, kwargs)
        if outcome is None:  # no longer inside `except`: an error of the user's own shall show nothing of ours
            return self._run_without_taps(wanted, failure, (*donated, *kept), args, kwargs)
        self._note(wanted, outcome)
        layout.update(outcome.info.restore, outcome.state)
        return outcome.info.restore(outcome.results)

    def _note(self, wanted: Sequence[tuple[JaxAdapter, OpenStep]], outcome: StepOutputs) -> None:
        """Pass the values of the step to the taps that want them; after a new trace, also what could not be seen."""
        new = outcome.info not in self._reported
        self._reported.add(outcome.info)
        for adapter, step in wanted:
            tap = _tap_of(adapter)
            tap.results.add(step, outcome.info.values, outcome.arrays)
            if new:
                tap.notes.update(outcome.info.opaque)
                tap.given.update(outcome.info.given)
                adapter.warn_of_unmatched()

    def _run_without_taps(self, wanted: Any, error: Exception | None, leaves: Any, args: Any, kwargs: Any) -> Any:
        """Run the step again without taps after it failed with them: an error is now the user's own; otherwise ours is
        counted.
        """
        if error is not None and any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise error
        results = self.function(*args, **kwargs)
        if isinstance(error, jax.errors.JAXTypeError):
            error = UnsupportedError(_NOT_COMPILABLE.format(str(error).splitlines()[0]))
        for adapter, _ in wanted:
            _tap_of(adapter).failed("running the step with taps", error or RuntimeError("no outcome"))
        return results

    def _count_nested(self, wanted: Any) -> None:
        for adapter, _ in wanted:
            counters = _tap_of(adapter).recorder.counters
            counters.add("unseen_steps")
            counters.warn(
                "differentiated",
                "a watched step was called inside jit, grad or vmap: it runs without taps there (counted as "
                "unseen_steps). Watch the outermost function: tensortap.watch_step(jax.jit(whole_step), model)",
            )

    def _program(self, adapters: tuple[JaxAdapter, ...]) -> Callable[..., Any]:
        key = tuple(_tap_of(adapter).number for adapter in adapters)
        if key not in self._programs:
            program = functools.partial(_run, self.function, adapters)
            self._programs[key] = jax.jit(program, static_argnums=0, donate_argnums=1)
        return self._programs[key]


class TraceInfo(NamedTuple):
    """Facts about a traced step, besides its values."""

    restore: Any
    values: tuple[ExtractedValue, ...]
    opaque: dict[str, str]
    given: frozenset[str]

    def __hash__(self) -> int:
        return id(self.restore)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceInfo) and self.restore is other.restore


class StepOutputs(NamedTuple):
    """What a watched step returns."""

    results: list[Any]
    state: list[Any]
    arrays: list[Any]
    info: TraceInfo


def _parts(outcome: StepOutputs) -> tuple[tuple[Any, ...], TraceInfo]:
    return outcome[:3], outcome.info


jax.tree_util.register_pytree_node(
    StepOutputs, _parts, lambda info, parts: StepOutputs(parts[0], parts[1], parts[2], info)
)


def _run(
    function: Callable[..., Any], adapters: Sequence[JaxAdapter], layout: CallLayout, donated: Any, kept: Any
) -> StepOutputs:
    """Trace the step with tags, and extract the tagged values. Traced by `jit`."""
    restore = layout.restorer()
    taps = {_tap_of(adapter).number: _tap_of(adapter) for adapter in adapters}
    given: set[str] = set()

    def flat(donated: Any, kept: Any) -> Any:
        args, kwargs = layout.unflatten(donated, kept)
        for adapter in adapters:
            given.update(_tag_parameters(adapter, (args, kwargs)))
        return restore.flatten(function(*args, **kwargs), (args, kwargs))

    with _tracing(taps):
        closed, shape = jax.make_jaxpr(flat, return_shape=True)(donated, kept)
    for adapter in adapters:
        adapter.model.refuse_constants(closed.consts)
    extractor = TagExtractor(
        export({n: tap.selection for n, tap in taps.items()}), RULES, _operations(taps), _scopes(adapters)
    )
    leaves, found = extractor.run(closed.jaxpr, closed.consts, jax.tree.leaves((donated, kept)))
    results, state = jax.tree.unflatten(jax.tree.structure(shape), leaves)
    arrays = kernel.packed(found.values, found.arrays)
    return StepOutputs(
        results, state, arrays, TraceInfo(restore, tuple(found.values), extractor.opaque, frozenset(given))
    )


@contextlib.contextmanager
def _tracing(taps: dict[int, JaxTap]) -> Iterator[None]:
    """Trace the inner functions again, with tags."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(CONTEXT(("tensortap", tuple(taps))))
        asking = [tap for tap in taps.values() if tap.selection.late]
        stack.enter_context(intercepting(lambda: asking))
        for tap in taps.values():
            tap.set_tracing(True)
            stack.callback(tap.set_tracing, False)
        yield


def _operations(taps: dict[int, JaxTap]) -> JaxOperations | None:
    asking = [tap for tap in taps.values() if tap.selection.has_operations]
    if not asking:
        return None
    return JaxOperations(lambda *place: [tap.number for tap in asking if tap.selection.wants_operation(*place)])


def _scopes(adapters: Sequence[JaxAdapter]) -> NameScopes | None:
    asking = [_tap_of(adapter) for adapter in adapters if adapter.model.kind in (None, "tree")]
    return (
        NameScopes(lambda path: [tap.number for tap in asking if tap.selection.wants_scope(path)]) if asking else None
    )


def _tag_parameters(adapter: JaxAdapter, arguments: Any) -> list[str]:
    tap = _tap_of(adapter)
    found = [
        (path, value_of(p)) for path, p in adapter.model.parameters_in(arguments) if tap.selection.wants(path, "param")
    ]
    for path, value in found:
        if watchable(value):
            tag(value, [Mark(tap.number, path, "param")])
    return [path for path, _ in found]


def _tap_of(adapter: JaxAdapter) -> JaxTap:
    assert adapter.tap is not None
    return adapter.tap


def watched(
    function: Any, model: Any, probes: Any, watch: Callable[..., Any], options: Any, arguments: Any
) -> StepFunction:
    """Put taps on a function of a step."""
    refuse_step(function)
    adapter = JaxAdapter(model, live=False)
    chosen = probes or (() if adapter.model.kind in ("nnx", "equinox", "linen", "haiku") else ("**",))
    return StepFunction(function, [adapter], watch(adapter, *chosen, **options), **arguments)
