"""The newest steps of a run: what can be looked at again every second, however long the run is."""

from __future__ import annotations

from typing import Final

from tensortap.store.run import Run
from tensortap.view.terminal.overview import Overview, overview

STEPS: Final = 256


def recent(run: Run, sites: list[str] | None = None, trend_of: str = "std", most: int = STEPS) -> Overview | None:
    """The overview of the last steps; None when there is nothing yet."""
    steps = run.steps
    return overview(run, sites, slice(steps[-most], None) if len(steps) > most else None, trend_of)


def left_out(run: Run, view: Overview) -> str:
    """A sentence about the steps before those in view; empty when there are none."""
    earlier = len(run.steps) - len(view.steps)
    return f"the last {len(view.steps)} steps; {earlier} earlier ones are not in this view" if earlier > 0 else ""
