"""Observe single operations by a function mode, active only while a watched module runs in a wanted step.

Hooks before and after every module tell which module runs, so that each operation's site lies under the module that
called it. The outermost module that runs in a thread pushes the mode.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from tensortap.adapters.plan import OpName, Plan
from tensortap.adapters.torch.autograd.gradients import StepSource, backward_task
from tensortap.adapters.torch.modules.hookset import new_hook_key
from tensortap.adapters.torch.modules.tensors import TensorObserver, without_torch_function
from tensortap.adapters.torch.ops.dispatch import OPAQUE, DispatchObserver
from tensortap.adapters.torch.ops.mode import STACK, OpMode, depth
from tensortap.adapters.torch.ops.names import known_operations, op_name, operations_of, returns_no_tensor
from tensortap.adapters.torch.ops.sites import OpPorts, OpSite
from tensortap.adapters.torch.ops.visibility import PlainModule, Visibility
from tensortap.record.recorder import OpenStep
from tensortap.reduce import kernel as kernels
from tensortap.select.operations import GROUPS
from tensortap.select.patterns import OperationPattern
from tensortap.select.sites import Pattern

NEVER: Final = "no such operation ran in a step that was observed"
_NOTHING: Final = contextlib.nullcontext()
_MOST_NUMBERS: Final = 10_000  # in one call of a module; those beyond count as further calls of the last


class RunningModules(threading.local):
    """The modules that are running in a thread, and the thread's mode. C reads `state`."""

    def __init__(self, taps: OpTaps) -> None:
        self.state = kernels.RunningCalls(*STACK)
        self.calls = self.state.calls
        self.mode = OpMode(taps, taps.known, taps.known_to_c)
        if taps.reader is not None:
            self.mode.use_c(taps.reader, self.state)
        self.above: int | None = None  # how many modes stay below ours

    def stay_above(self, modes: int) -> None:
        """Push the mode, from now on, directly above so many modes, which only Python does."""
        self.above = modes
        self.state.mode = None

    def adjust(self) -> None:
        """Activate the mode while the innermost module's operations may be observed."""
        state = self.state
        wanted = bool(self.calls) and self.calls[-1].visible
        if wanted and not state.is_on:
            self.mode.activate(self.above)
            state.is_on = True
        elif state.is_on and not wanted and (not self.calls or self.mode.is_on_top()):
            self.mode.deactivate()
            state.is_on = False


class OpTaps:
    """Observe the operations that probes want."""

    def __init__(
        self,
        observer: TensorObserver,
        steps: StepSource,
        plan: Plan,
        patterns: Sequence[Pattern],
        keep_fused: bool = True,
    ) -> None:
        self.observer = observer
        self.steps = steps
        self.wanted = plan
        self.patterns = tuple(patterns)
        self.bits = 0
        for i, probe in enumerate(plan.probes):
            self.bits |= any(pattern in self.patterns for pattern in probe.patterns) << i
        self.known: dict[Any, str | None] = {}
        self.known_to_c: dict[Any, str | None] = {}
        self.keys = tuple(new_hook_key() for _ in range(4))  # of hooks: two before modules, two after
        self.visibility = Visibility(observer.recorder.counters, keep_fused)
        self._sites: dict[str, dict[str, list[OpSite]]] = {}
        self.reader = observer.reader(steps)  # with which C observes; None where Python does
        self.running = RunningModules(self)
        self._lock = threading.RLock()  # a signal handler may come in between

    def wants(self, function: Callable[..., Any]) -> str | None:
        """Return the operation's name, if a pattern means it."""
        name = op_name(function)
        if function in OPAQUE:  # its inner operations are observed, whatever it is itself
            return name
        if not any(p.operation is not None and p.operation.means(name, GROUPS) for p in self.patterns):
            return None
        return None if returns_no_tensor(name) else name

    def observe(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation in the innermost running module, and record it."""
        calls, recorder = self.running.calls, self.observer.recorder
        step = self.steps.current() if recorder.per_thread else recorder.current
        if not calls or not step.armed & self.bits:
            return function(*args, **kwargs)
        site = self._site(calls[-1], name)
        if site is not None and site.only_output is not None and function not in OPAQUE:
            output = function(*args, **kwargs)
            self.take_left(site, output, step)
            return output
        run = partial(self._observe_inside, function, step) if function in OPAQUE else function
        if site is None or not (armed := step.armed & site.bits):
            return run(*args, **kwargs)
        return self._call(site, armed, step, run, args, kwargs)

    def take_left(self, site: OpSite, output: Any, step: OpenStep) -> None:
        """Record the output of an operation that C did not record, if only its output is wanted."""
        if type(output) is Tensor and site.only_output is not None:
            self.observer.take(site.only_output, output, step, backward_task() != -1)
        elif step.armed & site.bits:
            site.finish(site.ports, output, None, step, self.steps)

    def _call(
        self, site: OpSite, armed: int, step: OpenStep, function: Callable[..., Any], args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # fmt: skip
        ports: OpPorts | None = site.ports
        noted = None
        if site.asks or site.ports.input or site.ports.grad_input:
            try:
                with without_torch_function():
                    ports = site.wanted_by(armed, args, kwargs)
                    noted = None if ports is None else site.before(ports, args, kwargs, step)
            except Exception as error:
                site.failed(error)
        output = function(*args, **kwargs)
        if ports is not None:
            site.finish(ports, output, noted, step, self.steps)
        return output

    def _observe_inside(self, function: Callable[..., Any], step: OpenStep, *args: Any, **kwargs: Any) -> Any:
        with DispatchObserver(self._dispatcher_site, step, self.steps) as inside:
            output = function(*args, **kwargs)
        try:
            with without_torch_function():
                inside.await_gradients(output)
        except Exception as error:
            self._failed(f"the gradients inside {op_name(function)}", error)
        return output

    def _dispatcher_site(self, function: Any) -> OpSite | None:
        """Return the site of a dispatcher call in the innermost module."""
        name = self.known.get(function, "")
        if name == "":
            name = self.known[function] = self.wants(function)
        return None if name is None else self._site(self.running.calls[-1], name)

    def enter(
        self,
        owner: object,
        path: str,
        module: nn.Module | None = None,
        counts: dict[str, int] | None = None,
        plain: PlainModule | None = None,
    ) -> kernels.ModuleCall | None:
        """Begin a module's call, if the step is wanted or a module around it is observed; return it.

        With `counts` the numbering goes on from so many operations of each kind. `plain` says that the module neither
        runs fused nor is compiled.
        """
        running = self.running
        if not running.calls:
            step = self.steps.current()
            if not step.armed & self.bits:
                return None
            self.visibility.begin()
        visibility = self.visibility
        if plain is not None and plain.generation == visibility.generation:
            visible = not plain.is_idle
        else:
            visible = module is None or (visibility.allows(module, plain) and not (plain and plain.is_idle))
        sites = self._sites.get(path)
        if sites is None:
            sites = self._sites[path] = {}
        call = kernels.ModuleCall(owner, path, sites, visible, {} if counts is None else counts)
        running.calls.append(call)
        if visible is not running.state.is_on:
            running.adjust()
        return call

    def leave(self, owner: object) -> None:
        """End a module's call, also a failed one. Calls that an interrupt left above it end too."""
        running = self.running
        calls = running.calls
        for position in range(len(calls) - 1, -1, -1):
            if calls[position].owner is owner:
                del calls[position:]
                if not calls or calls[-1].visible is not running.state.is_on:
                    running.adjust()
                return

    def show(self, owner: object, module: nn.Module | None) -> None:
        """Observe the running module's operations from now on, if that is allowed; with None, stop for a while."""
        running = self.running
        if running.calls and running.calls[-1].owner is owner:
            running.calls[-1].visible = module is not None and self.visibility.allows(module)
            running.adjust()

    def stay_above_current_modes(self) -> None:
        """Push the mode, from now on, directly above the modes that are active now in this thread."""
        self.running.stay_above(depth())

    def close(self) -> None:
        """Stop observing: in this thread at once, in others when their modules return."""
        self.bits = 0
        self.drop()

    def drop(self) -> None:
        """Forget the running modules of this thread, which an interrupt may have left."""
        self.running.calls.clear()
        self.running.adjust()

    def parent(self) -> str | None:
        """Return the path of the innermost running module."""
        calls = self.running.calls
        return calls[-1].path if calls else None

    def idle(self) -> bool:
        """Return whether no watched module is running in this thread."""
        return not self.running.calls

    def unseen(self) -> dict[str, str]:
        """Return the patterns for operations that recorded nothing, each with the reason where it is known."""
        sites = [site for kinds in list(self._sites.values()) for found in list(kinds.values()) for site in found]
        ports = [port for site in sites for chosen in site.chosen() for group in chosen for port in group]
        seen = {pattern.text for port in ports if port.seen for pattern, _ in port.patterns}
        notes = {pattern.text: port.note for port in ports if port.note for pattern, _ in port.patterns}
        return {
            p.text: notes.get(p.text) or self.visibility.hidden or NEVER for p in self.patterns if p.text not in seen
        }

    def seen(self) -> set[str]:
        """Return the patterns that recorded something."""
        return {pattern.text for pattern in self.patterns} - set(self.unseen())

    def _site(self, call: kernels.ModuleCall, name: str) -> OpSite | None:
        """Return the site of the next operation of this kind in a module's call."""
        number = call.counts.get(name, 0)
        call.counts[name] = number + 1
        found = call.sites.setdefault(name, [])
        if number < len(found):
            site: OpSite = found[number]
            return site
        try:
            with self._lock:  # another thread may be in the same module
                while len(found) <= min(number, _MOST_NUMBERS - 1):
                    found.append(OpSite(self.observer, self.wanted, OpName(call.path, name, len(found)), self.reader))
        except Exception as error:
            self._failed(f"{name} in {call.path!r}", error)
            return None
        last: OpSite = found[min(number, _MOST_NUMBERS - 1)]
        return last

    def _failed(self, what: str, error: Exception) -> None:
        self.observer.recorder.counters.failed("skipped_tensors", f"observing {what}", error)


def op_patterns(plan: Plan, paths: Iterable[str]) -> list[Pattern]:
    """Return the patterns that mean operations. One with a slash may mean a value that the user names."""
    found = [p for probe in plan.probes for p in probe.patterns if p.operation is not None]
    if not found:
        return []
    under = frozenset(name for path in paths for name in {path, plan.site(path)})
    known = _KnownOperations()
    return [pattern for pattern in dict.fromkeys(found) if _means_operations(pattern, under, known)]


def means_operations(pattern: Pattern, paths: Iterable[str]) -> bool:
    """Return whether a pattern may mean operations of the modules at these paths."""
    return _means_operations(pattern, frozenset(paths), _KnownOperations())


class _KnownOperations(dict[str, bool]):
    """Whether there are operations that the text of a pattern means. They are listed once: there are thousands."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()

    def include(self, operation: OperationPattern) -> bool:
        known = self.get(operation.text)
        if known is None:
            self._names = self._names or known_operations()
            self[operation.text] = known = any(operation.means(name, GROUPS) for name in self._names)
        return known


def _means_operations(pattern: Pattern, paths: frozenset[str], known: _KnownOperations) -> bool:
    operation = pattern.operation
    if operation is None or pattern.kind == "op":
        return operation is not None
    if not known.include(operation):
        return False
    return any(operation.lies_in(path) for path in (paths if operation.paths is None else operation.paths & paths))


def wants_nothing_of(module: nn.Module, patterns: Iterable[Pattern]) -> bool:
    """Return whether a module is known to do only operations that no pattern means, so that it needs no hooks."""
    names = None if any(True for _ in module.children()) else operations_of(module)
    means = [pattern.operation.means for pattern in patterns if pattern.operation is not None]
    return names is not None and not any(mean(name, GROUPS) for mean in means for name in names)
