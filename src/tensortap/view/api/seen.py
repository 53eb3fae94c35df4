"""A run as it lies there at one moment: its files, places in order of execution, steps; and when there is more."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from tensortap.errors import RunError
from tensortap.store.catalog import Catalog, Outline, Sources, settled, tail_outline
from tensortap.store.run import Run
from tensortap.store.tail import read_tail
from tensortap.types import Place
from tensortap.view.api.block import Places, Triple
from tensortap.view.api.grid import Ints

PATIENCE: Final = 0.25  # seconds for which a look at the folder is good enough


class Seen:
    """What the files said when they were listed."""

    def __init__(self, version: str, state: str, sources: list[Sources], tails: dict[Path, Any]) -> None:
        self.version = version
        self.state = state
        self.sources = sources
        self.tails = tails
        outlines = [outline for source in sources for outline in source.segments.values()]
        outlines += [tail_outline(table) for table in tails.values()]
        self.records = sum(outline.rows for outline in outlines)
        self.places = _in_order(outlines)
        self.row: dict[Triple, int] = {}
        for place in self.places:
            self.row.setdefault((place.site, place.port, place.slot), len(self.row))
        self.rows_key = hash(tuple(self.row))
        self.steps = _steps(outlines)
        self._rows: dict[Places, Ints] = {}

    @property
    def names(self) -> list[str]:
        """The places as the page calls them; a place's index here is its row everywhere."""
        return [str(Place(*triple)) for triple in self.row]

    def rows_of(self, places: Places) -> Ints:
        """The row of each of a grid's columns."""
        if places not in self._rows:
            self._rows[places] = np.array([self.row.get(triple, -1) for triple in places.triples], np.int64)
        return self._rows[places]

    def triple(self, name: str) -> Triple:
        """The place of a name."""
        for triple in self.row:
            if str(Place(*triple)) == name:
                return triple
        raise RunError(f"no site {name!r} in this run")


class Watched:
    """A run that is looked at again and again; its files are listed at most every `PATIENCE` seconds."""

    def __init__(self, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self._clock = clock
        self._catalog = Catalog(run.files)
        self._lock = threading.Lock()
        self._seen: Seen | None = None
        self._until = 0.0
        self._tables: dict[tuple[Path, int], Any] = {}

    def spoil(self, name: str) -> None:
        """Leave out a segment that cannot be read, from now on."""
        self._catalog.spoil(name)

    def forget(self) -> None:
        """Look anew the next time: a file that was listed has gone, sealed or folded into another."""
        self._until = 0.0

    def look(self) -> Seen:
        """The run as it is now."""
        with self._lock:
            if self._seen is None or self._clock() >= self._until:
                self._seen = settled(self._look)
                self._until = self._clock() + PATIENCE
            return self._seen

    def _look(self) -> Seen:
        sources = self._catalog.records()
        sizes = [(path, path.stat().st_size) for source in sources for path in source.tails]
        state = self.run.state
        listed = [name for source in sources for name in source.segments]
        version = hashlib.sha256(repr((state, listed, sizes, self._metrics())).encode()).hexdigest()[:16]
        if self._seen is not None and self._seen.version == version:
            return self._seen
        known, self._tables = self._tables, {}
        for key in sizes:
            self._tables[key] = known[key] if key in known else read_tail(key[0])
        tails = {path: table for (path, _), table in self._tables.items() if table is not None}
        return Seen(version, "empty" if not listed and not tails and state != "live" else state, sources, tails)

    def _metrics(self) -> list[Any]:
        found = self._catalog.metrics()
        sizes = [path.stat().st_size for source in found for path in source.tails]
        return [*(name for source in found for name in source.segments), *sizes]


def _in_order(outlines: list[Outline]) -> list[Place]:
    """Every place once, in order of execution. Segments of one run mostly list the same places: each list once."""
    first: dict[Place, int] = {}
    for places in {id(outline.places): outline.places for outline in outlines}.values():
        for site, port, slot, op, seq, _ in places:
            place = Place(site, port, slot, op)
            first[place] = min(seq, first.get(place, seq))
    return sorted(first, key=lambda place: (first[place], place))


def _steps(outlines: list[Outline]) -> Ints:
    runs = {run for outline in outlines for run in map(tuple, outline.steps)}
    spans = [np.arange(first, last + 1, stride, dtype=np.int64) for first, last, stride in runs]
    return np.unique(np.concatenate(spans)) if spans else np.zeros(0, np.int64)
