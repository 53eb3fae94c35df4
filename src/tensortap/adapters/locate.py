"""Find the origin of a NaN or an infinity, for frameworks without single operations: the first layer that made one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tensortap.adapters.arrays import ArrayAdapter, ArrayCatcher
from tensortap.adapters.results import Captured, Origin, TensorSummary
from tensortap.record.recorder import OpenStep, Point, Recorder
from tensortap.reduce.summary import Summary, summarize
from tensortap.select.probes import as_probes

_CAME_IN: Final = "what it was given, which no layer before it gave"


class _Finder(ArrayCatcher):
    """Note the inputs of each layer, until a layer makes non-finite values of finite ones."""

    def __init__(self, recorder: Recorder, types: dict[str, str]) -> None:
        super().__init__(recorder, Captured())
        self.origin: Origin | None = None
        self._types = types
        self._given: dict[str, list[TensorSummary]] = {}
        self.came_in: Origin | None = None  # the first whose non-finite input came from no layer

    def take(self, point: Point, array: Any, step: OpenStep, recomputed: bool = False) -> None:
        """Check one array."""
        if self.origin is not None or recomputed:
            return
        site, port, slot, _ = point.place
        summary = summarize(array)
        if port == "input":
            self._given.setdefault(site, []).append(TensorSummary(slot, summary))
            if self.came_in is None and not _finite(summary):
                self.came_in = self._made(site, self._given[site], why=_CAME_IN)
            return
        given = self._given.pop(site, [])
        # If a layer's input was not seen and a non-finite value has come in before, its origin is not known.
        if (
            not _finite(summary)
            and all(_finite(seen.summary) for seen in given)
            and (given or not _spoilt(self.came_in))
        ):
            why = "" if self.came_in is None else f"first seen in what {self.came_in.site or '(root)'} was given"
            self.origin = self._made(site, given, output=summary, why=why)

    def _made(self, site: str, given: list[TensorSummary], why: str, output: Summary | None = None) -> Origin:
        return Origin("forward", site, self._types.get(site, ""), inputs=tuple(given), output=output, why=why)


def locate(adapter: ArrayAdapter, call: Callable[[], Any]) -> Origin | None:
    """Call once and name the first layer whose output is not finite although its input was.

    Where there is none, the first layer that was given something not finite: it was made between layers, or came in.
    """
    recorder = Recorder(as_probes(["**:{input,output}"]))
    types = {candidate.path: candidate.types[0] for candidate in adapter.candidates() if candidate.types}
    finder = _Finder(recorder, types)
    adapter.attach(recorder, adapter.plan(recorder.probes), finder)
    adapter.steps.explicit = True
    try:
        call()
    finally:
        adapter.detach()
    return finder.origin or (finder.came_in if _spoilt(finder.came_in) else None)


def _spoilt(came_in: Origin | None) -> bool:
    """Return whether the input held more than a mask, which is −inf on purpose."""
    return came_in is not None and any(seen.summary.nan or seen.summary.posinf for seen in came_in.inputs)


def _finite(summary: Any) -> bool:
    return not np.any([summary.nan, summary.posinf, summary.neginf])
