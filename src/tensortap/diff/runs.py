"""Two runs, step by step: records are paired, compared, and gathered by site."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tensortap.diff.align import Alignment, Look, Renames, align, renames
from tensortap.diff.kept import Shelf, common
from tensortap.diff.metrics import elements, histograms, relative, rms_of, statistics
from tensortap.diff.pair import Pair, batch_of
from tensortap.diff.result import Diff, SiteDiff
from tensortap.diff.tolerance import Precision, Tolerance, changed
from tensortap.errors import PatternError, RunError
from tensortap.record.step import Record
from tensortap.store.filters import Sites, Steps, places_matching, step_test
from tensortap.store.run import Run, open_run
from tensortap.types import Place

RunLike = Run | str | os.PathLike[str]
_LOOKED_AT: Final = 8  # steps in which to look for a site's shape when names say nothing
_ROWS_AT_ONCE: Final = 8192
Key = tuple[int, Place, int]  # rank, place, call


def diff(
    a: RunLike, b: RunLike, *, map: Renames = None, rtol: float | None = None, atol: float | None = None,
    sites: Sites = None, steps: Steps = None, progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diff:  # fmt: skip
    """Hold one run against another: where do they first part, and by how much?

    Records are paired by site, call, rank and step. Sites are found by `map`, a mapping of module names in `a` to
    those in `b` (with all below them; `*` is welcome); by name; and where fewer than half of the names match by order
    of execution and shape. Elements are compared where both runs kept them. `rtol` and `atol` replace the tolerance
    that goes with the types; `sites` and `steps` limit what is compared, as in `run.table`.
    """
    first, second = (run if isinstance(run, Run) else open_run(run) for run in (a, b))
    wanted = step_test(steps)
    steps_a, steps_b = ([s for s in run.steps if wanted(s)] for run in (first, second))
    both = sorted(set(steps_a) & set(steps_b))
    if not both:
        raise RunError(_no_step(first, second, steps))
    places = (_places(first), _places(second))
    aligned = align(*places, renames(map), lambda: (_looks(first, both), _looks(second, both)))
    aligned = _chosen(aligned, sites)
    found = _Found()
    precision = Precision(rtol, atol, changed=changed(_dtypes(first, second, aligned, both[0])))
    sides = (_by_step(first, both, aligned.pairs), _by_step(second, both, aligned.pairs.values()))
    for n, (records_a, records_b) in enumerate(zip(*sides, strict=True)):
        progress(n, len(both))
        precision.next_step()
        shelves = Shelf(first, both[n]), Shelf(second, both[n])
        found.add(*_pairs(records_a, records_b, *shelves, aligned.pairs, precision))
    return found.diff(first, second, aligned, both, steps_a, steps_b)


def _places(run: Run) -> list[Place]:
    return list(dict.fromkeys(place._replace(op="") for place in run.places))


def _looks(run: Run, steps: Sequence[int]) -> dict[Place, Look]:
    """The shapes and statistics by which sites are known when their names differ."""
    found: dict[Place, Look] = {}
    for record in run.records(steps=list(steps[:_LOOKED_AT])):
        place, summary = record.place._replace(op=""), record.summary
        values = (summary.mean, summary.std, summary.min, summary.max)
        numbers = tuple(x if math.isfinite(x) else 0.0 for x in values)
        found.setdefault(place, Look(place.port, summary.shape, numbers))
    return found


def _dtypes(a: Run, b: Run, aligned: Alignment, step: int) -> list[tuple[str, str]]:
    """The types of activations and gradients in both runs; parameters often keep theirs when the rest is cast."""
    names = ("site", "port", "slot", "dtype")
    known = [
        {Place(*where): dtype for *where, dtype in zip(*(table[n].to_pylist() for n in names), strict=True)}
        for table in (run.table(steps=step, columns=names) for run in (a, b))
    ]
    pairs = ((known[0].get(x), known[1].get(y)) for x, y in aligned.pairs.items() if x.port != "param")
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _chosen(aligned: Alignment, sites: Sites) -> Alignment:
    """What of it the patterns mean, in the names of either run."""
    if sites is None:
        return aligned
    known = [*aligned.pairs, *aligned.only_in_a, *aligned.pairs.values(), *aligned.only_in_b]
    meant = set(places_matching(sites, dict.fromkeys(known)))
    pairs = {a: b for a, b in aligned.pairs.items() if a in meant or b in meant}
    if not pairs:
        raise PatternError(f"what matches {sites} is in one run only: {', '.join(map(str, sorted(meant)[:3]))}")
    rest = (tuple(p for p in only if p in meant) for only in (aligned.only_in_a, aligned.only_in_b))
    return Alignment(pairs, aligned.by, *rest)


def _no_step(a: Run, b: Run, steps: Steps) -> str:
    for run in (a, b):
        if not run.steps:
            return f"{run.path} ({run.state}) holds no records yet"
    spans = " and ".join(f"{run.path} has {run.steps[0]} to {run.steps[-1]} ({len(run.steps)})" for run in (a, b))
    return f"the runs have no step in common{'' if steps is None else f' among {steps}'}: {spans}"


def _pairs(
    a: Mapping[Key, Record], b: Mapping[Key, Record], shelf_a: Shelf, shelf_b: Shelf, partners: Mapping[Place, Place],
    precision: Precision,
) -> tuple[list[Pair], int, int]:  # fmt: skip
    """One step's pairs in order of execution, and how many records of aligned sites have no partner in it."""
    pairs = []
    for (rank, place, call), record in a.items():
        other = b.get((rank, partners[place], call))
        if other is not None:
            tolerance = precision.tolerance(record.summary.dtype, other.summary.dtype, place.port)
            pairs.append(_compare(record, other, tolerance, shelf_a, shelf_b))
    return pairs, len(a) - len(pairs), len(b) - len(pairs)


def _by_step(run: Run, steps: Sequence[int], places: Iterable[Place]) -> Iterator[dict[Key, Record]]:
    """The records of each step in order of execution, several steps read at once: a reading costs more than a row."""
    wanted = set(places)
    at_once = max(1, _ROWS_AT_ONCE // max(len(wanted), 1))
    for start in range(0, len(steps), at_once):
        part = steps[start : start + at_once]
        found: dict[int, dict[Key, Record]] = {step: {} for step in part}
        for record in sorted(run.records(steps=part), key=lambda r: (r.seq, r.rank)):
            place = record.place._replace(op="")
            if place in wanted and not record.recomputed:
                found[record.step].setdefault((record.rank, place, record.call), record)
        yield from found.values()


def _compare(a: Record, b: Record, tolerance: Tolerance, shelf_a: Shelf, shelf_b: Shelf) -> Pair:
    x, y = a.summary, b.summary
    known: dict[str, Any] = {
        "step": a.step, "rank": a.rank, "site": str(a.place), "site_b": str(b.place), "call": a.call, "seq": a.seq,
        "dtype": x.dtype, "dtype_b": y.dtype, "shape": x.shape, "shape_b": y.shape,
        "rtol": tolerance.rtol, "atol": tolerance.atol,
    }  # fmt: skip
    if x.numel != y.numel:
        note = f"shape {_shape(x.shape)} in a, {_shape(y.shape)} in b"
        return Pair(**known, error=math.inf, excess=math.inf, of="shape", note=note)
    gap = statistics(x, y, tolerance)
    known |= relative(x, y)
    if distance := histograms(x, y):
        known |= distance._asdict()
    where_a, where_b = ((r.rank, r.place._replace(op=""), r.call) for r in (a, b))
    part = common(shelf_a, shelf_b, where_a, where_b, x.shape, y.shape)
    if part is not None:
        found = elements(part.a, part.b, tolerance, rms_of(x))
        known |= {name: getattr(found, name) for name in ("max_abs", "max_rel", "nl2", "cosine", "sqnr", "bit_equal")}
        known |= {"kept": part.kind, "elements": part.a.size}
        if found.excess >= gap.excess:
            return Pair(
                **known, error=found.error, excess=found.excess, of="elements", note=_nonfinite(a, b, found.misplaced)
            )
    return Pair(**known, error=gap.error, excess=gap.excess, of=gap.of, note=_nonfinite(a, b, gap.of in ("nan", "inf")))


def _nonfinite(a: Record, b: Record, misplaced: int) -> str:
    """What is NaN or infinite in one but not the other, in words."""
    if not misplaced:
        return ""
    x, y = a.summary, b.summary
    for name, count_a, count_b in (
        ("NaN", x.nan, y.nan),
        ("Inf", x.posinf, y.posinf),
        ("−Inf", x.neginf, y.neginf),
    ):
        if count_a != count_b:
            return f"{name} in {count_a} of {x.numel} elements in a, in {count_b} in b"
    return f"NaN or Inf at other places: {misplaced} elements"


def _shape(shape: Iterable[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


class _Found:
    """Gathers pairs by site as steps go by."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, str], SiteDiff] = {}
        self._batches: list[Any] = []
        self._first: Pair | None = None
        self._unequal: Pair | None = None
        self._alone = [0, 0]

    def add(self, pairs: Sequence[Pair], alone_a: int, alone_b: int) -> None:
        """One step."""
        self._alone = [self._alone[0] + alone_a, self._alone[1] + alone_b]
        self._batches.append(batch_of(pairs))
        for pair in pairs:
            key = (pair.site, pair.site_b)
            known = self._sites.get(key) or SiteDiff(pair, None, 0, 0)
            self._sites[key] = SiteDiff(
                worst=pair if pair.excess > known.worst.excess else known.worst,
                first=known.first or (pair if pair.differs else None),
                pairs=known.pairs + 1,
                differing=known.differing + pair.differs,
            )
            self._first = self._first or (pair if pair.differs else None)
            self._unequal = self._unequal or (pair if pair.unequal else None)

    def diff(
        self, a: Run, b: Run, aligned: Alignment, both: Sequence[int], steps_a: Sequence[int], steps_b: Sequence[int]
    ) -> Diff:
        """All of it, the worst site first."""
        if not self._sites:
            raise RunError(
                f"no site of {a.path} has a partner in {b.path} at the same step; give a map of names: OLD=NEW"
            )
        rows = sorted(self._sites.values(), key=lambda row: (-row.worst.excess, -row.worst.error))
        other: dict[tuple[str, str], list[str]] = {}
        for worst in (row.worst for row in self._sites.values()):
            if worst.dtype != worst.dtype_b:
                other.setdefault((worst.dtype, worst.dtype_b), []).append(worst.site)
        common = set(both)
        return Diff(
            a=a.path,
            b=b.path,
            rows=tuple(rows),
            first=self._first,
            first_unequal=self._unequal,
            aligned_by=aligned.by,
            only_in_a=tuple(map(str, aligned.only_in_a)),
            only_in_b=tuple(map(str, aligned.only_in_b)),
            steps=tuple(both),
            steps_only_in_a=tuple(s for s in steps_a if s not in common),
            steps_only_in_b=tuple(s for s in steps_b if s not in common),
            alone_in_a=self._alone[0],
            alone_in_b=self._alone[1],
            dtypes={types: tuple(sites) for types, sites in other.items()},
            shapes=sum(r.worst.shape != r.worst.shape_b and r.worst.of != "shape" and not r.worst.kept for r in rows),
            batches=tuple(self._batches),
        )
