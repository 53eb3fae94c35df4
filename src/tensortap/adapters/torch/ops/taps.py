"""Single operations: seen by a function mode that is on only while a watched module runs in a step that is wanted.

Hooks before and after every module tell which module runs, so that each operation has a site under the one that
called it. They go on and off together, like all hooks; the outermost module that runs in a thread puts the mode on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from tensortap.adapters.protocol import OpName, Plan
from tensortap.adapters.torch.autograd.gradients import Steps
from tensortap.adapters.torch.modules.hookset import fresh_key
from tensortap.adapters.torch.modules.tensors import TensorObserver, aside, mode_is_on
from tensortap.adapters.torch.ops.dispatch import OPAQUE, Inside
from tensortap.adapters.torch.ops.mode import OpMode, depth
from tensortap.adapters.torch.ops.names import is_silent, known_operations, op_name
from tensortap.adapters.torch.ops.sites import OpSite, Ports
from tensortap.adapters.torch.ops.visibility import Visibility
from tensortap.record.recorder import OpenStep
from tensortap.select.operations import GROUPS
from tensortap.select.sites import Pattern

NEVER: Final = "no such operation ran in a step that was observed"
_NOTHING: Final = contextlib.nullcontext()
_MOST_NUMBERS: Final = 10_000  # in one call of a module; what is beyond counts as further calls of the last


class Scope:
    """A module that is running: its path, the sites in it, and how many operations of each kind it has done."""

    __slots__ = ("counts", "owner", "path", "sites", "visible")

    def __init__(
        self, owner: object, path: str, sites: dict[str, list[OpSite]], visible: bool, counts: dict[str, int]
    ) -> None:
        self.owner = owner
        self.path = path
        self.sites = sites
        self.visible = visible
        self.counts = counts


class Running(threading.local):
    """The modules that are running in a thread, innermost last, and the thread's own mode."""

    def __init__(self, taps: OpTaps) -> None:
        self.scopes: list[Scope] = []
        self.mode = OpMode(taps, taps.known)
        self.is_on = False
        self.above: int | None = None  # how many modes are to stay below it

    def adjust(self) -> None:
        """The mode is on while the innermost module may be looked into."""
        wanted = bool(self.scopes) and self.scopes[-1].visible
        if wanted and not self.is_on:
            self.mode.on(self.above)
            self.is_on = True
        elif self.is_on and not wanted and (not self.scopes or self.mode.on_top()):
            self.mode.off()
            self.is_on = False


class OpTaps:
    """Looks at operations for the probes that want some."""

    def __init__(
        self, observer: TensorObserver, steps: Steps, plan: Plan, patterns: Sequence[Pattern], keep_fused: bool = True
    ) -> None:
        self.observer = observer
        self.steps = steps
        self.wanted = plan
        self.patterns = tuple(patterns)
        self.bits = 0
        for i, probe in enumerate(plan.probes):
            self.bits |= any(pattern in self.patterns for pattern in probe.patterns) << i
        self.known: dict[Any, str | None] = {}
        self.keys = tuple(fresh_key() for _ in range(4))  # of hooks: two before modules, two after
        self.visibility = Visibility(observer.recorder.counters, keep_fused)
        self._sites: dict[str, dict[str, list[OpSite]]] = {}
        self._running = Running(self)
        self._lock = threading.Lock()

    def wants(self, function: Callable[..., Any]) -> str | None:
        """The operation's name, if a pattern means it."""
        name = op_name(function)
        if function in OPAQUE:  # to be looked into, whatever it is itself
            return name
        if not any(p.operation is not None and p.operation.means(name, GROUPS) for p in self.patterns):
            return None
        return None if is_silent(name) else name

    def observe(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of an operation in the innermost module that is running."""
        scopes = self._running.scopes
        steps = self.steps
        step = steps.current() if steps.spread else self.observer.recorder.current
        if not scopes or not step.armed & self.bits:
            return function(*args, **kwargs)
        site = self._site(scopes[-1], name)
        run = partial(self._look_inside, function, step) if function in OPAQUE else function
        if site is None or not (armed := step.armed & site.bits):
            return run(*args, **kwargs)
        return self._call(site, armed, step, run, args, kwargs)

    def _call(
        self, site: OpSite, armed: int, step: OpenStep, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        ports: Ports | None = site.ports
        noted = None
        if site.asks or site.ports.input or site.ports.grad_input:
            try:
                with aside():
                    ports = site.wanted_by(armed, args, kwargs)
                    noted = None if ports is None else site.before(ports, args, kwargs, step)
            except Exception as error:
                site.failed(error)
        output = function(*args, **kwargs)
        if ports is not None:
            try:
                with aside() if mode_is_on() or type(output) is not Tensor else _NOTHING:
                    site.after(ports, output, noted, step, self.steps)
            except Exception as error:
                site.failed(error)
        return output

    def _look_inside(self, function: Callable[..., Any], step: OpenStep, *args: Any, **kwargs: Any) -> Any:
        with Inside(self._of_dispatcher, step, self.steps) as inside:
            output = function(*args, **kwargs)
        try:
            with aside():
                inside.gradients(output)
        except Exception as error:
            self._failed(f"the gradients inside {op_name(function)}", error)
        return output

    def _of_dispatcher(self, function: Any) -> OpSite | None:
        """The site of what the dispatcher is asked for by the innermost module."""
        name = self.known.get(function, "")
        if name == "":
            name = self.known[function] = self.wants(function)
        return None if name is None else self._site(self._running.scopes[-1], name)

    def enter(
        self, owner: object, path: str, module: nn.Module | None = None, counts: dict[str, int] | None = None
    ) -> None:
        """A module begins to run. Nothing happens unless the step is wanted, or a module around it is looked at.

        With `counts` it goes on where it was left: so many operations of each kind were done.
        """
        running = self._running
        if not running.scopes:
            step = self.steps.current()
            if not step.armed & self.bits:
                return
            self.visibility.begin()
        visible = module is None or self.visibility.of(module)
        sites = self._sites.get(path)
        if sites is None:
            sites = self._sites[path] = {}
        running.scopes.append(Scope(owner, path, sites, visible, {} if counts is None else counts))
        if visible is not running.is_on:
            running.adjust()

    def leave(self, owner: object) -> None:
        """It has run, or failed. What an interrupted call has left above it goes too."""
        running = self._running
        scopes = running.scopes
        for position in range(len(scopes) - 1, -1, -1):
            if scopes[position].owner is owner:
                del scopes[position:]
                if not scopes or scopes[-1].visible is not running.is_on:
                    running.adjust()
                return

    def show(self, owner: object, module: nn.Module | None) -> None:
        """Look into the module that runs, if that may be; with None, look away for a while."""
        running = self._running
        if running.scopes and running.scopes[-1].owner is owner:
            running.scopes[-1].visible = module is not None and self.visibility.of(module)
            running.adjust()

    def mark(self) -> None:
        """Wherever the mode goes on in this thread from now on, it is above the modes that are on now and no other."""
        self._running.above = depth()

    def close(self) -> None:
        """See no more: in this thread at once, in others whatever is still running."""
        self.bits = 0
        self.drop()

    def drop(self) -> None:
        """Nothing is running in this thread, whatever an interrupt has left."""
        self._running.scopes.clear()
        self._running.adjust()

    def parent(self) -> str | None:
        """The path of the innermost module that is running."""
        scopes = self._running.scopes
        return scopes[-1].path if scopes else None

    def idle(self) -> bool:
        """Whether no watched module is running in this thread."""
        return not self._running.scopes

    def unseen(self) -> dict[str, str]:
        """The patterns for operations that nothing was recorded for, each with the reason where it is known."""
        sites = [site for kinds in list(self._sites.values()) for found in list(kinds.values()) for site in found]
        ports = [port for site in sites for chosen in site.chosen() for group in chosen for port in group]
        seen = {pattern.text for port in ports if port.seen for pattern, _ in port.patterns}
        notes = {pattern.text: port.note for port in ports if port.note for pattern, _ in port.patterns}
        return {
            p.text: notes.get(p.text) or self.visibility.hidden or NEVER for p in self.patterns if p.text not in seen
        }

    def seen(self) -> set[str]:
        """The patterns that something was recorded for."""
        return {pattern.text for pattern in self.patterns} - set(self.unseen())

    def _site(self, scope: Scope, name: str) -> OpSite | None:
        """The site of the next operation of this kind in a module's call."""
        number = scope.counts.get(name, 0)
        scope.counts[name] = number + 1
        found = scope.sites.setdefault(name, [])
        if number < len(found):
            return found[number]
        try:
            with self._lock:  # another thread may be in the same module
                while len(found) <= min(number, _MOST_NUMBERS - 1):
                    found.append(OpSite(self.observer, self.wanted, OpName(scope.path, name, len(found))))
        except Exception as error:
            self._failed(f"{name} in {scope.path!r}", error)
            return None
        return found[min(number, _MOST_NUMBERS - 1)]

    def _failed(self, what: str, error: Exception) -> None:
        self.observer.recorder.counters.failed("skipped_tensors", f"observing {what}", error)


def op_patterns(plan: Plan, paths: Iterable[str]) -> list[Pattern]:
    """The patterns that mean operations. One with a slash may be for a value that the user names."""
    found = [p for probe in plan.probes for p in probe.patterns if p.operation is not None]
    if not found:
        return []
    under = [name for path in paths for name in {path, plan.site(path)}]
    return [pattern for pattern in dict.fromkeys(found) if means_operations(pattern, under)]


def means_operations(pattern: Pattern, paths: Iterable[str]) -> bool:
    """Whether a pattern may find operations of the modules at these paths."""
    operation = pattern.operation
    if operation is None or pattern.kind == "op":
        return operation is not None
    known = any(operation.means(name, GROUPS) for name in known_operations())
    return known and any(operation.lies_in(path) for path in paths)
