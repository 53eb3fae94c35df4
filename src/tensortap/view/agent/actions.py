"""The requests of an agent to live runs, if control is allowed: `Actions(where).capture("fc1:output", run="exp1")`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensortap.control.client import ask
from tensortap.control.requests import ControlRequest


class Actions:
    """The requests to the live runs below a folder. `where` returns the path of a run."""

    def __init__(self, where: Callable[[str], str]) -> None:
        self._where = where

    def status(self, run: str = "") -> dict[str, Any]:
        """Say which step a live run is at, whether it is paused, and what its probes are."""
        return self._ask(run, ControlRequest(action="status"))

    def capture(self, sites: str, keep: str = "stats", steps: int = 1, run: str = "") -> dict[str, Any]:
        """Keep more of some sites of a live run for a few steps; `keep` is stats, histogram, sample:N, rows:0,2, full.

        Several patterns and several things to keep are separated by spaces.
        """
        asked = ControlRequest(action="capture", sites=tuple(sites.split()), keep=tuple(keep.split()), steps=steps)
        return self._ask(run, asked)

    def pause(self, run: str = "") -> dict[str, Any]:
        """Record nothing of a live run until `resume`; the training goes on."""
        return self._ask(run, ControlRequest(action="pause"))

    def resume(self, run: str = "") -> dict[str, Any]:
        """Record a live run again."""
        return self._ask(run, ControlRequest(action="resume"))

    def note(self, text: str, run: str = "") -> dict[str, Any]:
        """Put a sentence into the events of a live run."""
        return self._ask(run, ControlRequest(action="note", text=text))

    def _ask(self, run: str, request: ControlRequest) -> dict[str, Any]:
        answers = ask(self._where(run), request)
        shown = ("ok", "said", "step", "rank", "state", "probes")
        return {"ranks": [{name: a.reply[name] for name in shown if name in a.reply} for a in answers[:16]]}
