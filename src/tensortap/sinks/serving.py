"""The base of sinks for metrics servers: a few chosen sites, as every site is a time series a statistic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tensortap.errors import ProbeError
from tensortap.record.step import Record
from tensortap.select.sites import Candidate, Pattern
from tensortap.sinks.base import RecordSink
from tensortap.sinks.numbers import STATS, stats_asked
from tensortap.types import Place

_ANYTHING: Final = ("zq7xk", "zq7xk.9.wv_3")  # names that only a pattern for everything matches
HELP: Final[Mapping[str, str]] = {
    "nonfinite": "NaN and infinite elements of the newest tensor",
    "zero_share": "share of zeros in the newest tensor",
    "absmax": "largest finite magnitude in the newest tensor",
}


class ServingSink(RecordSink):
    """Take the records of chosen sites, of at most `most` places; `left_out` counts those of places beyond that."""

    def __init__(self, sites: tuple[str, ...], stats: Iterable[str] = STATS, most: int = 100) -> None:
        self._patterns = tuple(_chosen(type(self).__name__, text) for text in sites)
        self._stats = stats_asked(stats)
        self._most = most
        self._known: dict[Place, bool] = {}
        self.left_out = 0
        if not sites:
            raise ProbeError(_refusal(type(self).__name__, "no site at all"))

    def record(self, record: Record) -> None:
        """Take a record of a chosen site."""
        if not record.recomputed and self._wants(record.place):
            self.take(record, labels(record))

    def take(self, record: Record, labels: dict[str, str]) -> None:
        """Publish a record under its labels."""
        raise NotImplementedError

    def _wants(self, place: Place) -> bool:
        known = self._known.get(place)
        if known is None:
            chosen = any(_fits(pattern, place) for pattern in self._patterns)
            known = chosen and sum(self._known.values()) < self._most
            self.left_out += chosen and not known
            self._known[place] = known
        return known


def labels(record: Record) -> dict[str, str]:
    """Return what tells one time series from another."""
    place = record.place
    return {"site": place.site, "port": f"{place.port}{place.slot}", "rank": str(record.rank)}


def help_for(stat: str) -> str:
    """Return a short description of a statistic."""
    return HELP.get(stat, f"{stat} of the newest tensor's finite elements")


def _fits(pattern: Pattern, place: Place) -> bool:
    candidate = Candidate(place.site, (), (place.port,))
    return pattern.matches(candidate, place.port) and pattern.matches_slot(place.slot)


def _chosen(sink: str, text: Any) -> Pattern:
    pattern = Pattern.parse(text)
    if pattern.kind in ("type", "op"):
        raise ProbeError(f"{sink}({pattern.text!r}): a sink knows names, not types or operations; write paths")
    if any(pattern.matches(Candidate(name, (), (port,)), port) for name in _ANYTHING for port in pattern.ports):
        raise ProbeError(_refusal(sink, repr(pattern.text)))
    return pattern


def _refusal(sink: str, given: str) -> str:
    return (
        f"{sink} was given {given}: every site is a time series for each statistic, which metrics servers do not "
        f"bear by the thousand. Choose: {sink}('head', 'blocks.0.mlp:output'); the run folder takes them all"
    )
