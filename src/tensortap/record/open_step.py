"""What an adapter holds while a step is recorded: the step, and a point for each place it observes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensortap.record.table import StepTable
from tensortap.reduce import kernel as kernels
from tensortap.types import Place


class Point:
    """One place to observe: its number in the run, and the probes (as bits) that matched it, decided once."""

    __slots__ = ("keeping", "key", "place", "probes", "text", "whole")

    def __init__(self, place: Place, key: int, probes: int, keeping: int, whole: int) -> None:
        self.place = place
        self.key = key
        self.probes = probes
        self.keeping = keeping  # those of the probes that keep elements or call the user's functions
        self.whole = whole  # those of them that keep the whole tensor and nothing else of it
        self.text = str(place)


Armed = tuple[int, int, int, int]
"""What is decided about a step before it begins, probes being bits of an integer: its number; the probes that may want
it (0 costs nothing); those of them that can only say when the step has ended; and those that take histograms, unless
the budget thins them. A plain tuple, for one is made in every step."""


class OpenStep(kernels.StepState):
    """A step being recorded.

    Adapters read `armed` before they touch a tensor, write rows into `table`, and may set `metrics`, `labels`,
    `phase` and `origin`.
    """

    __slots__ = (
        "calls", "idle", "labels", "maybe", "metrics", "number", "old_gradients", "origin", "owner", "phase", "table",
    )  # fmt: skip

    def __init__(self, table: StepTable, armed: Armed) -> None:
        self.table = table
        self.number, self.armed, self.maybe, self.hist = armed
        self.idle = armed[1] == 0
        self.old_gradients = False  # what gradients there are when it ends are those of a step before
        self.owner = ""  # the model that is trained, where a script has several
        self.metrics: dict[str, float] = {}  # what the adapter found; the user's own have precedence
        self.origin: Any = None  # where its first non-finite value comes from, if that was looked for
        self.phase = ""
        self.labels: Mapping[str, str] = {}
        self.closed = False
        self.calls: dict[Any, Any] = {}  # an adapter's count of calls, by whatever it counts

    @property
    def is_untouched(self) -> bool:
        """Return whether nothing has been seen in it."""
        return not (self.table.rows or self.calls or self.phase or self.metrics or self.labels or self.closed)

    def exchange(self, other: OpenStep) -> None:
        """Take the number of another step, and what was decided about it; that one takes this one's."""
        mine = (self.number, self.armed, self.maybe, self.hist, self.idle)
        self.number, self.armed, self.maybe, self.hist, self.idle = (
            other.number, other.armed, other.maybe, other.hist, other.idle
        )  # fmt: skip
        other.number, other.armed, other.maybe, other.hist, other.idle = mine

    def begin(self, armed: Armed) -> None:
        """Become this step. A step that no probe wanted is used again for the next one, as it holds nothing."""
        self.number, self.armed, self.maybe, self.hist = armed
        self.idle = armed[1] == 0
        self.old_gradients = False
        self.owner = ""
        self.metrics = {}
