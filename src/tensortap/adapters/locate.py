"""The origin of a NaN or an infinity, for frameworks without an operation level: the first layer that made one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tensortap.adapters.arrays import ArrayAdapter, Catcher
from tensortap.adapters.base import OneStep, offered
from tensortap.adapters.results import Captured, Origin, Seen
from tensortap.probes import as_probes
from tensortap.recorder import OpenStep, Point, Recorder
from tensortap.reduce.summary import summarize


class _Finder(Catcher):
    """Notes what each layer is given, until one makes of finite numbers something that is not."""

    def __init__(self, recorder: Recorder, types: dict[str, str]) -> None:
        super().__init__(recorder, Captured())
        self.origin: Origin | None = None
        self._types = types
        self._given: dict[str, list[Seen]] = {}

    def take(self, point: Point, array: Any, step: OpenStep, recomputed: bool = False) -> None:
        """Look at one array."""
        if self.origin is not None or recomputed:
            return
        site, port, slot, _ = point.place
        summary = summarize(array)
        if port == "input":
            self._given.setdefault(site, []).append(Seen(slot, summary))
            return
        given = self._given.pop(site, [])
        if not _finite(summary) and all(_finite(seen.summary) for seen in given):
            self.origin = Origin("forward", site, self._types.get(site, ""), inputs=tuple(given), output=summary)


def locate(adapter: ArrayAdapter, call: Callable[[], Any]) -> Origin | None:
    """Call once and name the first layer whose output is not finite although its input was."""
    recorder = Recorder(as_probes(["**:{input,output}"]))
    types = {candidate.path: candidate.types[0] for candidate in adapter.candidates() if candidate.types}
    finder = _Finder(recorder, types)
    adapter.attach(recorder, offered(adapter, recorder.probes), OneStep(), finder)
    try:
        call()
    finally:
        adapter.detach()
    return finder.origin


def _finite(summary: Any) -> bool:
    return not np.any([summary.nan, summary.posinf, summary.neginf])
