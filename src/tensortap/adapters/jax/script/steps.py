"""The steps of a JAX script: calls of the compiled function that is given parameters and returns them, or gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from tensortap.adapters.jax.layers import kind_of
from tensortap.adapters.jax.script.adapter import JaxScriptAdapter, host
from tensortap.adapters.jax.script.events import JaxScriptEvents
from tensortap.adapters.jax.script.functions import WatchedFunction
from tensortap.adapters.jax.script.trees import (
    Leaf,
    ReturnedArgument,
    is_array,
    leaves_of,
    loss_in,
    matches,
    named_arguments,
    parameters_of,
    part_at,
)

_MOST_COPIED: Final = 64 << 20  # bytes of parameters that are copied to see what a step changes
_PLAIN_CALLS: Final = 3  # so many calls of a function without parameters make it the one that is watched


class ScriptCall(NamedTuple):
    """One call: its arguments by name, copies of the parameters among them as they were, and what it returned."""

    arguments: dict[str, Any]
    before: dict[str, list[Leaf]]
    results: Any = None


@dataclass
class Roles:
    """The function that is watched: which argument it trains, and what it returns."""

    found: list[ReturnedArgument]
    in_place: str = ""  # the argument that the function changes
    gradients: bool | None = None  # its results are gradients, not parameters; None: not known yet

    @property
    def model(self) -> str:
        """The argument that holds the parameters."""
        return self.in_place or (self.found[0].argument if self.found else "")

    @property
    def states(self) -> set[str]:
        """The arguments that are not data."""
        return {match.argument for match in self.found} | ({self.in_place} if self.in_place else set())


@dataclass
class ScriptSteps:
    """Find the function whose calls are the steps, and record what goes in and comes out."""

    begin: Callable[[JaxScriptAdapter], Any]
    events: JaxScriptEvents = field(default_factory=JaxScriptEvents)
    failure: str = ""
    _main: WatchedFunction | None = None
    _tap: Any = None
    _adapter: JaxScriptAdapter | None = None
    _roles: Roles = field(default_factory=lambda: Roles([]))
    _open: ScriptCall | None = None  # the call that is going on
    _last: dict[int, ScriptCall] = field(default_factory=dict)  # of each function, until one is chosen
    _waiting: ScriptCall | None = None  # the last call of the chosen one: it is recorded when the next one begins

    def before_call(self, function: WatchedFunction, args: Any, kwargs: Any) -> None:
        """Read the arguments before the call, since the function may donate them."""
        if not self.failure and self._main in (None, function):
            self._guarded(lambda: self._before(function, named_arguments(function.signature, args, kwargs)))

    def after_call(self, function: WatchedFunction, results: Any) -> None:
        """Look at the results."""
        if self._open is not None and self._main in (None, function):
            self._guarded(lambda: self._after(function, results))

    def finish(self) -> None:
        """Record the last call."""
        if self._tap is not None:
            self._guarded(lambda: self._close_step(None))
            self._guarded(lambda: self.events.end(self._tap.recorder.events))

    def _guarded(self, act: Callable[[], None]) -> None:
        """Keep our errors away from the script."""
        try:
            act()
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self._open = self._waiting = None

    def _before(self, function: WatchedFunction, arguments: dict[str, Any]) -> None:
        if self._main is None and (last := self._last.get(id(function))) is not None:
            threaded = [m for m in matches(last.arguments, last.results) if _is_threaded(m, last, arguments)]
            if threaded or function.calls > _PLAIN_CALLS:
                self._choose(function, last, Roles(threaded))
        if self._waiting is not None:
            self._close_step(arguments)
        wanted = [self._roles.model] if self._main is not None else list(arguments)
        copied = [name for name in wanted if name in arguments] if self._copying() else []
        self._open = ScriptCall(arguments, {name: _copies(arguments[name]) for name in copied})

    def _copying(self) -> bool:
        return self._adapter is None or any(map(self._adapter.wants, ("param", "update", "grad")))

    def _after(self, function: WatchedFunction, results: Any) -> None:
        assert self._open is not None
        call, self._open = self._open._replace(results=results), None
        if self._main is None:
            found = [m for m in matches(call.arguments, results) if len(leaves_of(call.arguments[m.argument])) > 1]
            in_place = next((name for name, value in call.arguments.items() if _is_nnx_model(value)), "")
            if found or in_place:
                self._choose(function, call, Roles(found, in_place))
            else:
                self._last[id(function)] = call
        else:
            self._waiting = call

    def _choose(self, function: WatchedFunction, call: ScriptCall, roles: Roles) -> None:
        self._main, self._roles = function, roles
        parameters = parameters_of(call.arguments[roles.model]) if roles.model else []
        sizes = {leaf.name: int(np.size(leaf.value)) for leaf in parameters}
        name = str(getattr(function, "__name__", "function"))
        self._adapter = JaxScriptAdapter(name, sizes)
        self._tap = self.begin(self._adapter)
        self._last.clear()
        if self._tap is None:
            self._adapter = None
            return
        self.events.model(self._tap.recorder.events, name, parameters)
        self._waiting = call

    def _close_step(self, following: dict[str, Any] | None) -> None:
        """Record a call, now that the next one shows whether what it returned are parameters."""
        call, self._waiting = self._waiting, None
        if call is None or self._adapter is None or self._tap is None:
            return
        if self._roles.found and self._roles.gradients is None:
            first = self._roles.found[0]
            same = following is not None and _is_threaded(first, call, following)
            self._roles.gradients = not same and not _is_close(first, call)
        self._record(call, self._adapter)
        loss = loss_in(call.results)
        self._tap.step(**({} if loss is None else {"loss": loss}))

    def _record(self, call: ScriptCall, adapter: JaxScriptAdapter) -> None:
        before = call.before.get(self._roles.model, [])
        after = self._after_values(call)
        for name, value in before:
            adapter.see(name, "param", value)
        changes: list[Leaf] = []
        for (name, old), (_, new) in zip(before, after, strict=False):
            if self._roles.gradients:
                adapter.see(name, "grad", new)
            elif np.shape(old) == np.shape(new):
                with np.errstate(all="ignore"):
                    changes.append(Leaf(name, np.asarray(host(new), np.float32) - np.asarray(old, np.float32)))
                adapter.see(name, "update", changes[-1].value)
        self.events.parameters(self._tap.recorder.events, before, changes)
        self._record_data(call, adapter)

    def _record_data(self, call: ScriptCall, adapter: JaxScriptAdapter) -> None:
        data = [(name, leaf) for name, leaf in _data(call.arguments, self._roles.states) if is_array(leaf)]
        for name, leaf in data:
            adapter.see("", "input", leaf, f".{name}")
        states = [match.result for match in self._roles.found]
        for path, leaf in _data(_top(call.results), set()):
            if is_array(leaf) and not any(path.startswith(_start(state)) for state in states):
                adapter.see("", "output", leaf, f".{path}")
        self.events.batch(self._tap.recorder.events, data)

    def _after_values(self, call: ScriptCall) -> list[Leaf]:
        if self._roles.in_place:
            return parameters_of(call.arguments[self._roles.in_place])
        if not self._roles.found:
            return []
        found = parameters_of(part_at(call.results, self._roles.found[0].result))
        return [leaf for leaf in found if is_array(leaf.value)]


def _copies(value: Any) -> list[Leaf]:
    """Return copies of the parameters in an argument, or nothing if they are too large."""
    found = [leaf for leaf in parameters_of(value) if is_array(leaf.value)]
    if sum(leaf.value.nbytes for leaf in found) > _MOST_COPIED:
        return []
    return [Leaf(leaf.name, np.array(host(leaf.value), copy=True)) for leaf in found]


def _is_threaded(match: ReturnedArgument, call: ScriptCall, following: dict[str, Any]) -> bool:
    """Return whether what a call returned is given to the next one."""
    if match.argument not in following:
        return False
    given = {id(leaf.value) for leaf in leaves_of(following[match.argument])}
    return any(id(leaf.value) in given for leaf in leaves_of(part_at(call.results, match.result)))


def _is_close(match: ReturnedArgument, call: ScriptCall) -> bool:
    """Return whether results are near the arguments that they replace, as parameters after a step are."""
    pairs = zip(call.before.get(match.argument, ()), parameters_of(part_at(call.results, match.result)), strict=False)
    apart = [
        float(np.linalg.norm(host(new) - old) / max(float(np.linalg.norm(old)), 1e-12)) for (_, old), (_, new) in pairs
    ]
    return bool(apart) and float(np.median(apart)) < 0.5


def _is_nnx_model(value: Any) -> bool:
    return kind_of(value) == "nnx" and bool(leaves_of(value))


def _data(values: Any, without: set[str]) -> list[tuple[str, Any]]:
    """Return arrays in named values, by slot."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        if name not in without:
            found += [(f"{name}.{leaf.name}".rstrip("."), leaf.value) for leaf in leaves_of(value)]
    return found


def _top(results: Any) -> dict[str, Any]:
    if type(results) in (tuple, list):
        return {str(i): part for i, part in enumerate(results)}
    return {str(k): v for k, v in results.items()} if type(results) is dict else {"result": results}


def _start(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, path)) or "result"
