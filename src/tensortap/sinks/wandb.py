"""Send records to Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tensortap.errors import needs
from tensortap.sinks.numbers import STATS
from tensortap.sinks.tracker import Tracker, TrackerRow, plain_row

_PREFIX: Final = "tensortap/"
_STEP: Final = f"{_PREFIX}step"


class WandB(Tracker):
    """Log to the run that is active, or to one of its own that ends with the tap.

    >>> import tensortap as tt
    >>> tt.watch(model, to=["runs/exp1", tt.WandB()])                              # doctest: +SKIP
    >>> tt.watch(model, to=tt.WandB(project="layers", mode="offline"))             # doctest: +SKIP

    Everything is called `tensortap/…` and drawn over `tensortap/step`, so your own step is left alone. In a run of
    yours a row goes out with your next `log()`: a step for which you log nothing is replaced by the next, and
    `replaced` counts those. `options` are those of `wandb.init`. NaN and infinities are counted in `…/nonfinite`.
    """

    def __init__(
        self, run: Any = None, *, stats: Iterable[str] = STATS, histograms: bool = True, **options: Any
    ) -> None:
        super().__init__(stats=stats, histograms=histograms)
        with needs("WandB(…)", "tensortap[wandb]"):
            import wandb
        self._wandb = wandb
        found = run or (None if options else self._wandb.run)
        self._own = found is None
        self.run = found or self._wandb.init(**{"project": "tensortap", "reinit": "create_new", **options})
        self.run.define_metric(_STEP, hidden=True)
        self.run.define_metric(f"{_PREFIX}*", step_metric=_STEP)
        self._last = -1  # the run's own step when the row before was handed over
        self.replaced = 0

    def send(self, row: TrackerRow) -> None:
        """Log a row: as a step of its own in a run that we started, else as part of the user's next step."""
        drawn = {f"{_PREFIX}{n}": self._wandb.Histogram(np_histogram=h) for n, h in row.histograms.items()}
        logged = {_STEP: row.step, **plain_row(row, _PREFIX), **drawn}
        if self._own:
            self.run.log(logged | row.metrics)
            return
        self.run.log(logged, commit=False)  # first: asking a run that has ended for its step would wait for ever
        now = self.run.step
        self.replaced += now == self._last
        self._last = now

    def end(self) -> None:
        """End the run if it is ours."""
        if self._own:
            self.run.finish()

    def __str__(self) -> str:
        return f"Weights & Biases run {self.run.name or self.run.id}"
