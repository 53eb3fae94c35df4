"""Compare two runs step by step: pair their records, compare each pair, collect the result by site."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensortap.diff.align import Alignment, Renames, SiteSignature, align, renames
from tensortap.diff.elements import KeptElements, common_elements
from tensortap.diff.metrics import elements, histograms, relative, rms_of, statistics
from tensortap.diff.pair import Pair, batch_of
from tensortap.diff.result import Diff, SiteDiff
from tensortap.diff.tolerance import Precision, Tolerance, changed
from tensortap.errors import PatternError, RunError
from tensortap.record.step import Record
from tensortap.store.catalog import retry_if_moved
from tensortap.store.filters import SiteSelection, StepSelection, places_matching, step_test
from tensortap.store.queries import records_in, table
from tensortap.store.run import Run, open_run
from tensortap.store.snapshot import Snapshot
from tensortap.types import Place

RunLike = Run | str | os.PathLike[str]
_SIGNATURE_STEPS: Final = 8  # steps from which a site's shape is taken when names say nothing
_ROWS_AT_ONCE: Final = 8192
Key = tuple[int, Place, int]  # rank, place, call


def diff(
    a: RunLike, b: RunLike, *, map: Renames = None, rtol: float | None = None, atol: float | None = None,
    sites: SiteSelection = None, steps: StepSelection = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diff:  # fmt: skip
    """Compare two runs and report the first divergence.

    Records are paired by site, call, rank and step. Sites are paired by `map`, a mapping of module names in `a` to
    those in `b` (with all below them; `*` is allowed); by name; and where fewer than half of the names match by order
    of execution and shape. Elements are compared where both runs kept them. `rtol` and `atol` replace the tolerance
    that goes with the types; `sites` and `steps` limit what is compared, as in `run.table`.
    """
    first, second = (run if isinstance(run, Run) else open_run(run) for run in (a, b))

    def compare() -> Diff:
        sides = (Side(run, run.snapshots.take()) for run in (first, second))
        return diff_snapshots(*sides, map=map, rtol=rtol, atol=atol, sites=sites, steps=steps, progress=progress)

    return retry_if_moved(compare)  # once more when one of them was compacted meanwhile


class Side(NamedTuple):
    """One of the two runs: its records as of one snapshot; kept tensors are looked up in the run by their keys."""

    run: Run
    snapshot: Snapshot

    def records(self, steps: Sequence[int]) -> Iterator[Record]:
        """Return the records of some steps."""
        return records_in(table(self.snapshot, steps=list(steps)))


def diff_snapshots(
    a: Side, b: Side, *, map: Renames = None, rtol: float | None = None, atol: float | None = None,
    sites: SiteSelection = None, steps: StepSelection = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diff:  # fmt: skip
    """Compare two runs as they were when the snapshots were taken."""
    wanted = step_test(steps)
    steps_a, steps_b = ([s for s in side.snapshot.steps.tolist() if wanted(s)] for side in (a, b))
    both = paired_steps(_phases(a, steps_a), _phases(b, steps_b))
    if not both:
        raise RunError(_no_step(a, b, steps))
    of_a, of_b = [pair[0] for pair in both], [pair[1] for pair in both]
    aligned = align(_places(a), _places(b), renames(map), lambda: (_signatures(a, of_a), _signatures(b, of_b)))
    aligned = _chosen(aligned, sites)
    found = _DiffBuilder()
    precision = Precision(rtol, atol, changed=changed(_dtypes(a, b, aligned, both[0])))
    read = (_by_step(a, of_a, aligned.pairs), _by_step(b, of_b, aligned.pairs.values()))
    kept = KeptElements(*a), KeptElements(*b)
    for n, (records_a, records_b) in enumerate(zip(*read, strict=True)):
        progress(n, len(both))
        precision.next_step()
        found.add(*_pairs(records_a, records_b, *kept, aligned.pairs, precision))
    return found.diff(a.run, b.run, aligned, both, steps_a, steps_b)


def paired_steps(a: Mapping[int, str], b: Mapping[int, str]) -> list[tuple[int, int]]:
    """Return which steps are compared, from the phase of each: those of one number, unless their phases differ.

    When any do, as in runs that evaluate at other times, the first training step of one is compared with the first
    training step of the other, and so on, and likewise for each other phase. Runs that share no phase are compared by
    number.

    >>> paired_steps({0: "train", 1: "train", 2: "eval"}, {1: "train", 2: "eval", 3: "eval"})
    [(1, 1), (2, 2)]
    >>> paired_steps({0: "train", 1: "eval", 2: "train"}, {0: "train", 1: "train", 2: "eval"})
    [(0, 0), (1, 2), (2, 1)]
    """
    common = sorted(a.keys() & b.keys())
    shared = [phase for phase in dict.fromkeys(a.values()) if phase and phase in set(b.values())]
    if not shared or all(a[step] == b[step] for step in common):
        return [(step, step) for step in common]
    pairs = []
    for phase in shared:
        of_a, of_b = (sorted(step for step, of in side.items() if of == phase) for side in (a, b))
        pairs += list(zip(of_a, of_b, strict=False))
    return sorted(pairs)


def _phases(side: Side, steps: Sequence[int]) -> dict[int, str]:
    """Return the phase of each step."""
    rows = table(side.snapshot, columns=("step", "phase")).group_by(["step"]).aggregate([("phase", "min")])
    known = dict(zip(rows["step"].to_pylist(), rows["phase_min"].to_pylist(), strict=True))
    return {step: str(known.get(step) or "") for step in steps}


def _places(side: Side) -> list[Place]:
    return list(dict.fromkeys(place._replace(op="") for place in side.snapshot.places))


def _signatures(side: Side, steps: Sequence[int]) -> dict[Place, SiteSignature]:
    """Return the shapes and statistics by which sites are paired when their names differ."""
    found: dict[Place, SiteSignature] = {}
    for record in side.records(steps[:_SIGNATURE_STEPS]):
        place, summary = record.place._replace(op=""), record.summary
        values = (summary.mean, summary.std, summary.min, summary.max)
        numbers = tuple(x if math.isfinite(x) else 0.0 for x in values)
        found.setdefault(place, SiteSignature(place.port, summary.shape, numbers))
    return found


def _dtypes(a: Side, b: Side, aligned: Alignment, steps: tuple[int, int]) -> list[tuple[str, str]]:
    """Return the types of activations and gradients in both runs; parameters often keep theirs when others change."""
    names = ("site", "port", "slot", "dtype")
    known = [
        {Place(*where): dtype for *where, dtype in zip(*(rows[n].to_pylist() for n in names), strict=True)}
        for rows in (table(s.snapshot, steps=step, columns=names) for s, step in zip((a, b), steps, strict=True))
    ]
    pairs = ((known[0].get(x), known[1].get(y)) for x, y in aligned.pairs.items() if x.port != "param")
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _chosen(aligned: Alignment, sites: SiteSelection) -> Alignment:
    """Return what of it the patterns mean, in the names of either run."""
    if sites is None:
        return aligned
    known = [*aligned.pairs, *aligned.only_in_a, *aligned.pairs.values(), *aligned.only_in_b]
    meant = set(places_matching(sites, dict.fromkeys(known)))
    pairs = {a: b for a, b in aligned.pairs.items() if a in meant or b in meant}
    if not pairs:
        raise PatternError(f"what matches {sites} is in one run only: {', '.join(map(str, sorted(meant)[:3]))}")
    rest = (tuple(p for p in only if p in meant) for only in (aligned.only_in_a, aligned.only_in_b))
    return Alignment(pairs, aligned.by, *rest)


def _no_step(a: Side, b: Side, steps: StepSelection) -> str:
    for run, snapshot in (a, b):
        if not len(snapshot.steps):
            return f"{run.path} ({snapshot.state}) holds no records yet"
    known = [(run.path, snapshot.steps) for run, snapshot in (a, b)]
    spans = " and ".join(f"{path} has {steps[0]} to {steps[-1]} ({len(steps)})" for path, steps in known)
    return f"the runs have no step in common{'' if steps is None else f' among {steps}'}: {spans}"


def _pairs(
    a: Mapping[Key, Record], b: Mapping[Key, Record], kept_a: KeptElements, kept_b: KeptElements,
    partners: Mapping[Place, Place], precision: Precision,
) -> tuple[list[Pair], int, int]:  # fmt: skip
    """Return one step's pairs in order of execution, and how many records of aligned sites have no partner in it."""
    pairs = []
    for (rank, place, call), record in a.items():
        other = b.get((rank, partners[place], call))
        if other is not None:
            tolerance = precision.tolerance(record.summary.dtype, other.summary.dtype, place.port)
            pairs.append(_compare(record, other, tolerance, kept_a, kept_b))
    return pairs, len(a) - len(pairs), len(b) - len(pairs)


def _by_step(side: Side, steps: Sequence[int], places: Iterable[Place]) -> Iterator[dict[Key, Record]]:
    """Yield the records of each step in order of execution; several steps are read at once, which is faster."""
    wanted = set(places)
    at_once = max(1, _ROWS_AT_ONCE // max(len(wanted), 1))
    for start in range(0, len(steps), at_once):
        part = steps[start : start + at_once]
        found: dict[int, dict[Key, Record]] = {step: {} for step in part}
        for record in sorted(side.records(part), key=lambda r: (r.seq, r.rank)):
            place = record.place._replace(op="")
            if place in wanted and not record.recomputed:
                found[record.step].setdefault((record.rank, place, record.call), record)
        yield from found.values()


def _compare(a: Record, b: Record, tolerance: Tolerance, kept_a: KeptElements, kept_b: KeptElements) -> Pair:
    x, y = a.summary, b.summary
    known: dict[str, Any] = {
        "step": a.step, "step_b": b.step, "rank": a.rank, "site": str(a.place), "site_b": str(b.place),
        "call": a.call, "seq": a.seq, "dtype": x.dtype, "dtype_b": y.dtype, "shape": x.shape, "shape_b": y.shape,
        "rtol": tolerance.rtol, "atol": tolerance.atol,
    }  # fmt: skip
    if x.numel != y.numel:
        note = f"shape {_shape(x.shape)} in a, {_shape(y.shape)} in b"
        return Pair(**known, error=math.inf, excess=math.inf, of="shape", note=note)
    gap = statistics(x, y, tolerance)
    known |= relative(x, y)
    if distance := histograms(x, y):
        known |= distance._asdict()
    call_a, call_b = ((r.step, r.rank, r.place._replace(op=""), r.call) for r in (a, b))
    kept = common_elements(kept_a, kept_b, call_a, call_b, x.shape, y.shape)
    if kept is not None:
        found = elements(kept.a, kept.b, tolerance, rms_of(x))
        known |= {name: getattr(found, name) for name in ("max_abs", "max_rel", "nl2", "cosine", "sqnr", "bit_equal")}
        known |= {"kept": kept.kind, "elements": kept.a.size}
        if found.excess >= gap.excess:
            return Pair(
                **known, error=found.error, excess=found.excess, of="elements", note=_nonfinite(a, b, found.misplaced)
            )
    return Pair(**known, error=gap.error, excess=gap.excess, of=gap.of, note=_nonfinite(a, b, gap.of in ("nan", "inf")))


def _nonfinite(a: Record, b: Record, misplaced: int) -> str:
    """Return what is NaN or infinite in one but not the other, in words."""
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


class _DiffBuilder:
    """Collects pairs by site, step by step."""

    def __init__(self) -> None:
        self._sites: dict[tuple[str, str], SiteDiff] = {}
        self._batches: list[Any] = []
        self._first: Pair | None = None
        self._unequal: Pair | None = None
        self._alone = [0, 0]

    def add(self, pairs: Sequence[Pair], alone_a: int, alone_b: int) -> None:
        """Add the pairs of one step."""
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
        self,
        a: Run,
        b: Run,
        aligned: Alignment,
        both: Sequence[tuple[int, int]],
        steps_a: Sequence[int],
        steps_b: Sequence[int],
    ) -> Diff:
        """Return all of it, the worst site first."""
        if not self._sites:
            raise RunError(
                f"no site of {a.path} has a partner in {b.path} at the same step; give a map of names: OLD=NEW"
            )
        rows = sorted(self._sites.values(), key=lambda row: (-row.worst.excess, -row.worst.error))
        other: dict[tuple[str, str], list[str]] = {}
        for worst in (row.worst for row in self._sites.values()):
            if worst.dtype != worst.dtype_b:
                other.setdefault((worst.dtype, worst.dtype_b), []).append(worst.site)
        common_a, common_b = ({pair[side] for pair in both} for side in (0, 1))
        return Diff(
            a=a.path,
            b=b.path,
            rows=tuple(rows),
            first=self._first,
            first_unequal=self._unequal,
            aligned_by=aligned.by,
            only_in_a=tuple(map(str, aligned.only_in_a)),
            only_in_b=tuple(map(str, aligned.only_in_b)),
            steps=tuple(step for step, _ in both),
            steps_only_in_a=tuple(s for s in steps_a if s not in common_a),
            steps_only_in_b=tuple(s for s in steps_b if s not in common_b),
            alone_in_a=self._alone[0],
            alone_in_b=self._alone[1],
            dtypes={types: tuple(sites) for types, sites in other.items()},
            shapes=sum(r.worst.shape != r.worst.shape_b and r.worst.of != "shape" and not r.worst.kept for r in rows),
            batches=tuple(self._batches),
        )
