"""Values that the user names with `tensortap.tap(x, "my/value")`: outputs of no module, and their gradients.

Names are known only when they turn up. A pattern that is to wait for one must have a slash in it (`"my/value"`,
`"my/value:grad_output"`, `"my/*"`); one without would be taken for a misspelt module. `"**"` finds named values too.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling

from tensortap.adapters.protocol import Plan, Port
from tensortap.adapters.torch.autograd.gradients import Steps, await_outputs, backward_task, count_call
from tensortap.adapters.torch.compile import backward as compiled_backward
from tensortap.adapters.torch.compile import operators as compiled
from tensortap.adapters.torch.compile.operators import Found, Regions, Target, is_exporting
from tensortap.adapters.torch.compile.sites import GradientSite, Site
from tensortap.adapters.torch.modules.hooks import tracing
from tensortap.adapters.torch.modules.nested import tensors_in
from tensortap.adapters.torch.modules.tensors import TensorObserver, aside
from tensortap.select.ports import RESULT_PORTS
from tensortap.select.sites import Candidate

NO_VALUE: Final = "no value of this name was tapped"
_SLOT: Final = "\x1e"  # between a name and a slot, where an operation in a compiled graph carries both


class _Name(NamedTuple):
    output: Port | None
    gradient: Port | None
    sites: tuple[Site, Site]  # of output and gradient, inside what torch.compile made


class NamedValues:
    """Sees the values that the user names."""

    def __init__(self, observer: TensorObserver, steps: Steps, plan: Plan, regions: Regions) -> None:
        self._observer = observer
        self._steps = steps
        self._plan = plan
        self._regions = regions
        self._known: dict[str, _Name] = {}
        self._targets = (_Values(self, 0, regions), _Values(self, 1, regions))
        self._site, self._grad_site = (target.site for target in self._targets)
        self._gradients = any("grad_output" in p.ports for probe in plan.probes for p in probe.patterns)

    def see_anywhere(self, name: str, value: Any) -> bool:
        """A value in eager or in compiled code. False when there is no tensor in it."""
        if is_compiling():
            if not is_exporting():
                self.see_compiled(name, value)
            return True
        return tracing() is not None or self.see(name, value)

    def see_compiled(self, name: str, value: Any) -> None:
        """Put operations into the graph that do what `see` does."""
        found = [(name + _SLOT + slot, tensor) for slot, tensor in tensors_in(value)]
        compiled.see(self._site, found)
        if self._gradients:
            compiled_backward.expect(self._grad_site, found)

    def known(self, name: str) -> _Name:
        """What is wanted of a name; decided the first time."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._decide(name)
        return known

    def see(self, name: str, value: Any) -> bool:
        """Record the tensors in a value and await their gradients. False when there is none."""
        known = self.known(name)
        found, recomputed = list(tensors_in(value)), backward_task() != -1
        step = self._steps.current()
        if known.output is not None and step.armed & known.output.bits:
            for slot, tensor in found:
                self._observer.take(known.output.point(slot), tensor, step, recomputed)
        if known.gradient is not None and step.armed & known.gradient.bits:
            call = count_call(step, known.gradient, recomputed)
            with aside():
                await_outputs(self._observer, self._steps, [known.gradient], found, step, call)
        return bool(found)

    def unseen(self) -> dict[str, str]:
        """Patterns that could only mean named values, and found none."""
        return {pattern.text: NO_VALUE for pattern in self._plan.waiting(self._known, RESULT_PORTS)}

    def failed(self, error: Exception) -> None:
        """A value in compiled code could not be recorded."""
        self._observer.recorder.counters.failed("skipped_values", "recording a named value in compiled code", error)

    def _decide(self, name: str) -> _Name:
        candidate, recorder = Candidate(name, (), RESULT_PORTS), self._observer.recorder
        output, gradient = (self._plan.port_for_named_value(recorder, candidate, port) for port in RESULT_PORTS)
        place = (self._observer, self._steps)
        sites = (
            Site(*place, [output] if output else [], self._regions),
            GradientSite(*place, [gradient] if gradient else [], self._regions),
        )
        return _Name(output, gradient, sites)


class _Values(Target):
    """All named values inside compiled graphs, or all their gradients: each operation carries its name."""

    __slots__ = ("names", "which")

    def __init__(self, names: NamedValues, which: int, regions: Regions) -> None:
        super().__init__(regions)
        self.names = names
        self.which = which

    def see(self, tensor: Tensor, slot: str) -> None:
        """A value, or its gradient."""
        name, _, slot = slot.partition(_SLOT)
        self._of(name).see(tensor, slot)

    def told(self, note: str, slots: list[str]) -> None:
        """Gradients of these may come; all are slots of one value."""
        if slots:
            self._of(slots[0].partition(_SLOT)[0]).told(note, [slot.partition(_SLOT)[2] for slot in slots])

    def expect(self, found: Found) -> None:
        """As in eager mode."""
        if found:
            self._of(found[0][0].partition(_SLOT)[0]).expect([(s.partition(_SLOT)[2], t) for s, t in found])

    def failed(self, error: Exception) -> None:
        """Count it."""
        self.names.failed(error)

    def _of(self, name: str) -> Site:
        return self.names.known(name).sites[self.which]
