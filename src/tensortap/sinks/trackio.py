"""Send records to trackio."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tensortap.errors import needs
from tensortap.sinks.numbers import STATS
from tensortap.sinks.tracker import Tracker, TrackerRow, plain_row

_PREFIX: Final = "tensortap/"


class Trackio(Tracker):
    """Log to a run of trackio that is given, or to one of its own that ends with the tap.

    >>> import tensortap as tt
    >>> tt.watch(model, to=["runs/exp1", tt.Trackio(project="layers")])             # doctest: +SKIP

    Everything is called `tensortap/…`, with the tap's step numbers. `options` are those of `trackio.init`. NaN and
    infinities are counted in `…/nonfinite`.
    """

    def __init__(
        self, run: Any = None, *, stats: Iterable[str] = STATS, histograms: bool = True, **options: Any
    ) -> None:
        super().__init__(stats=stats, histograms=histograms)
        with needs("Trackio(…)", "tensortap[trackio]"):
            import trackio
        self._trackio = trackio
        self._own = run is None
        self.run = run or self._trackio.init(**{"project": "tensortap", "embed": False, **options})

    def send(self, row: TrackerRow) -> None:
        """Log a row, with the user's metrics if the run is ours."""
        drawn = {f"{_PREFIX}{n}": self._trackio.Histogram(np_histogram=h) for n, h in row.histograms.items()}
        self.run.log(plain_row(row, _PREFIX) | drawn | (row.metrics if self._own else {}), step=row.step)

    def end(self) -> None:
        """End the run if it is ours."""
        if self._own:
            self.run.finish()

    def __str__(self) -> str:
        return f"trackio run {self.run.name}"
