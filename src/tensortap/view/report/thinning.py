"""Choose the steps of a very long run at which a report shows sites in detail.

Numbers are quick to read. Histograms are not, by far, and of a list in Parquet all that lies before a row has to be
decoded too: they are taken from the first step of files, where there are enough of them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from tensortap.store.blocks import sources
from tensortap.store.snapshot import Snapshot
from tensortap.view.api.grid import Ints

RECORDS: Final = 200_000  # of a longer run every n-th step is looked at closely: sites are 200 columns wide
HISTOGRAMS: Final = 50_000
_OF_SITE: Final = (50, 200)  # histograms, at least and at most: no more can be told apart on the page
_ENOUGH: Final = 0.9


class ShownSteps(NamedTuple):
    """One of `every` steps is shown in detail: which (None: all), and at which of them histograms are read."""

    every: int
    steps: list[int] | None = None
    histograms: list[int] | None = None


def shown_steps(snapshot: Snapshot) -> ShownSteps:
    """Return the steps at which a report shows sites in detail: all of them, unless there are very many records."""
    every = max(1, -(-snapshot.record_count // RECORDS))
    if every == 1:
        return ShownSteps(1)
    histograms = _histogram_steps(snapshot, snapshot.steps[::every])
    steps = np.union1d(snapshot.steps[::every], histograms)
    return ShownSteps(every, steps.tolist(), histograms.tolist())


def _histogram_steps(snapshot: Snapshot, steps: Ints) -> Ints:
    least, most = _OF_SITE
    count = min(max(HISTOGRAMS // max(len(snapshot.rows), 1), least), most, len(steps))
    even = steps[np.linspace(0, len(steps), count, endpoint=False).astype(np.int64)]
    firsts = np.unique([source.first for source in sources(snapshot)])
    firsts = firsts[np.isin(firsts, snapshot.steps)]
    if not len(firsts):
        return even
    nearest = np.unique(firsts[np.abs(firsts[None, :] - even[:, None]).argmin(axis=1)])
    return nearest if len(nearest) >= _ENOUGH * count else even
