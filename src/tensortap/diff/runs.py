"""Compare two runs step by step: pair their records, compare each pair, collect the result by site."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from tensortap import text
from tensortap.diff.align import Alignment, Renaming, SiteSignature, align, renames
from tensortap.diff.builder import DiffBuilder
from tensortap.diff.columnar import ColumnarComparison
from tensortap.diff.delayed_updates import DelayedUpdates
from tensortap.diff.elements import KeptElements, call_of, common_elements
from tensortap.diff.layout_runs import LayoutComparison
from tensortap.diff.layouts import LayoutSide
from tensortap.diff.pair import Pair
from tensortap.diff.phases import PairedSteps, PhaseStep, StepPair
from tensortap.diff.records import compare_records
from tensortap.diff.result import Diff
from tensortap.diff.row_pairs import RunPair
from tensortap.diff.site_names import common_names
from tensortap.diff.tolerance import Precision, changed
from tensortap.diff.wrong_pairs import without_pairs, wrong_pairs
from tensortap.distributed.mesh import require_all_ranks
from tensortap.errors import PatternError, RunError, UnsupportedError
from tensortap.record.step import Record
from tensortap.store.files import retry_if_moved
from tensortap.store.filters import SiteSelection, StepSelection, places_matching, step_test
from tensortap.store.queries import records_in, shards, step_rows, table
from tensortap.store.run import Run, open_run
from tensortap.store.snapshot import Snapshot
from tensortap.types import Place

RunLike = Run | str | os.PathLike[str]
_SIGNATURE_STEPS: Final = 8  # steps from which a site's shape is taken when names say nothing
_ROWS_AT_ONCE: Final = 8192
Key = tuple[int, Place, int]  # rank, place, call
_OTHER_LAYOUTS: Final = (
    "{} and {} are of other layouts, whose sums round otherwise: they cannot be the same to the last bit. Compare them "
    "without bitwise (--bitwise), and the ranks of one run by run.findings('replicas_differ')"
)


def diff(
    a: RunLike, b: RunLike, *, map: Renaming = None, rtol: float | None = None, atol: float | None = None,
    sites: SiteSelection = None, steps: StepSelection = None, mesh: Mapping[str, int] | None = None,
    bitwise: bool = False, progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diff:  # fmt: skip
    """Compare two runs and report the first divergence.

    Records are paired by site, call, rank, phase and step. Sites are paired by `map`, a mapping of module names in `a`
    to those in `b` (with all below them; `*` is allowed); by name; and where fewer than half of the names (of a port)
    match by order of execution and shape. Elements are compared where both runs kept them. `rtol` and `atol` replace
    the tolerance that goes with the types; `sites` and `steps` limit what is compared, as in `run.table`.

    Runs of different layouts (other ranks, other shards, other microbatches) are compared as one process would see
    them; `mesh`, such as `{"dp": 2, "tp": 4}`, says how the ranks of `b` lie where they did not record it, and `map`
    may be a function from a name in `b` to that in `a`. `bitwise=True` asks whether the runs are the same to the last
    bit: by `tt.content_hash()` or all elements where they were kept, else by all statistics.
    """
    first, second = _opened(a), _opened(b)

    def compare() -> Diff:
        sides = (Side(run, run.snapshots.take()) for run in (first, second))
        return diff_snapshots(*sides, map=map, rtol=rtol, atol=atol, sites=sites, steps=steps, mesh=mesh,
                              bitwise=bitwise, progress=progress)  # fmt: skip

    return retry_if_moved(compare)  # once more when one of them was compacted meanwhile


def _opened(run: Any) -> Run:
    if not isinstance(run, (Run, str, os.PathLike)) and callable(run):
        raise UnsupportedError(
            f"tt.diff compares runs: each must be a run or its path, got {text.a_kind(run)}. To compare models on a "
            "batch, write tt.compare(a, b, batch)"
        )
    return run if isinstance(run, Run) else open_run(run)


class Side(NamedTuple):
    """One of the two runs: its records as of one snapshot; kept tensors are looked up in the run by their keys."""

    run: Run
    snapshot: Snapshot

    def records(self, steps: Sequence[PhaseStep]) -> Iterator[Record]:
        """Return the records of some steps."""
        wanted = set(steps)
        found = records_in(table(self.snapshot, steps=[at.step for at in steps]))
        return (record for record in found if _step_of(record) in wanted)


def diff_snapshots(
    a: Side, b: Side, *, map: Renaming = None, rtol: float | None = None, atol: float | None = None,
    sites: SiteSelection = None, steps: StepSelection = None, mesh: Mapping[str, int] | None = None,
    bitwise: bool = False, progress: Callable[[int, int], None] = lambda done, total: None,
) -> Diff:  # fmt: skip
    """Compare two runs as they were when the snapshots were taken."""
    paired = PairedSteps.of(a.snapshot, b.snapshot, step_test(steps))
    both = paired.both
    if not both:
        raise RunError(_no_step(a, b, steps))
    of_a, of_b = [pair[0] for pair in both], [pair[1] for pair in both]
    found = DiffBuilder(bitwise=bitwise)
    if bitwise and (rtol or atol or mesh is not None):
        raise RunError("bitwise=True allows no difference: leave out rtol, atol and mesh")

    def signatures() -> tuple[dict[Place, SiteSignature], dict[Place, SiteSignature]]:
        return _signatures(a, of_a), _signatures(b, of_b)

    if mesh is not None or callable(map) or _spread_differently(a, b, both[0]):
        if bitwise:
            raise RunError(_OTHER_LAYOUTS.format(a.run.path, b.run.path))
        for side in (a, b):
            require_all_ranks(side.run.path, side.snapshot.ranks, shards(side.snapshot), side.snapshot.run_json)
        names = common_names(_places(a)), common_names(_places(b), map if callable(map) else None)
        given = renames(None if callable(map) else map)
        aligned = align(
            _unique(names[0]), _unique(names[1]), given, lambda: _in_names(signatures(), names), spread=True
        )
        aligned = _chosen(aligned, sites)
        precision = Precision(rtol, atol, changed=changed(_dtypes(a, b, _own_names(aligned, *names), both[0])))
        comparison = LayoutComparison(_layout(a, None), _layout(b, mesh), aligned, precision)
        updates = DelayedUpdates()
        for n, (step_a, step_b) in enumerate(both):
            progress(n, len(both))
            pairs = comparison.step(list(a.records([step_a])), list(b.records([step_b])), *names)
            found.add(updates.step(pairs), 0, 0)
        found.add(updates.rest(), 0, 0)
        return found.diff(a.run, b.run, aligned, paired, comparison.layouts)
    aligned = align(_places(a), _places(b), renames(map), signatures)
    aligned = _chosen(aligned, sites)

    def compared(aligned: Alignment) -> Diff:
        precision = Precision(rtol, atol, changed=changed(_dtypes(a, b, aligned, both[0])))
        runs = RunPair(a.snapshot, b.snapshot, both, aligned.pairs)
        columnar = ColumnarComparison(runs, kept, precision, bitwise=bitwise)
        pairs = lambda: PairComparison(a, b, aligned, *kept).pairs(both, copy.copy(precision))  # noqa: E731
        found.put(columnar.result(progress), pairs)
        return found.diff(a.run, b.run, aligned, paired)

    kept = KeptElements(*a), KeptElements(*b)
    result = compared(aligned)
    wrong = wrong_pairs(result.rows, aligned) if aligned.ordered else {}
    if not wrong:
        return result
    found = DiffBuilder(bitwise=bitwise)
    return compared(without_pairs(aligned, wrong))


class PairComparison:
    """Compare the records of two runs pair by pair: all that is known of every pair, and slow."""

    def __init__(self, a: Side, b: Side, aligned: Alignment, kept_a: KeptElements, kept_b: KeptElements) -> None:
        self._sides = a, b
        self._partners = aligned.pairs
        self._kept = kept_a, kept_b

    def steps(self, both: Sequence[StepPair], precision: Precision) -> Iterator[tuple[list[Pair], int, int]]:
        """Yield the pairs of each step, and how many records have no partner."""
        a, b = self._sides
        of_a, of_b = [pair[0] for pair in both], [pair[1] for pair in both]
        read = (_by_step(a, of_a, self._partners), _by_step(b, of_b, self._partners.values()))
        for records_a, records_b in zip(*read, strict=True):
            precision.next_step()
            yield _pairs(records_a, records_b, *self._kept, self._partners, precision)

    def pairs(self, both: Sequence[StepPair], precision: Precision) -> Iterator[list[Pair]]:
        """Yield the pairs of each step."""
        return (pairs for pairs, _, _ in self.steps(both, precision))


def _step_of(record: Record) -> PhaseStep:
    return PhaseStep(record.phase or "", record.step)


def _spread_differently(a: Side, b: Side, steps: StepPair) -> bool:
    """Return whether ranks hold other parts of tensors in one run than in the other, or steps other microbatches."""
    if a.snapshot.ranks != b.snapshot.ranks or shards(a.snapshot) != shards(b.snapshot):
        return True
    (calls_a, size_a), (calls_b, size_b) = (_calls(side, step) for side, step in zip((a, b), steps, strict=True))
    return calls_a != calls_b and size_a == size_b


def _calls(side: Side, at: PhaseStep) -> tuple[int, int]:
    """Return how often the first place of a step was called, and with how many elements in all."""
    places = _places(side)
    if not places:
        return 0, 0
    meant = {place[:3] for place in places_matching(str(places[0]), side.snapshot.places)}
    rows = step_rows(side.snapshot, ("numel",), at.step, at.phase, chosen=lambda place: place[:3] in meant)
    return len(rows), sum(rows["numel"].to_pylist())


def _layout(side: Side, mesh: Mapping[str, int] | None) -> LayoutSide:
    return LayoutSide.of(side.snapshot.ranks, shards(side.snapshot), KeptElements(*side), mesh)


def _unique(names: Mapping[Place, Place]) -> list[Place]:
    return list(dict.fromkeys(names.values()))


def _in_names(
    known: tuple[dict[Place, SiteSignature], ...], names: Sequence[Mapping[Place, Place]]
) -> tuple[dict[Place, SiteSignature], dict[Place, SiteSignature]]:
    """Return signatures by the names that places have in every layout."""
    a, b = ({of[own]: said for own, said in side.items() if own in of} for side, of in zip(known, names, strict=True))
    return a, b


def _own_names(aligned: Alignment, a: Mapping[Place, Place], b: Mapping[Place, Place]) -> Alignment:
    """Return the alignment in the names that each run has itself."""
    own_a, own_b = ({common: own for own, common in reversed(list(names.items()))} for names in (a, b))
    return aligned._replace(pairs={own_a[x]: own_b[y] for x, y in aligned.pairs.items()})


def _places(side: Side) -> list[Place]:
    return list(dict.fromkeys(place._replace(op="") for place in side.snapshot.places))


def _signatures(side: Side, steps: Sequence[PhaseStep]) -> dict[Place, SiteSignature]:
    """Return the shapes and statistics by which sites are paired when their names differ."""
    found: dict[Place, SiteSignature] = {}
    for record in side.records(steps[:_SIGNATURE_STEPS]):
        place, summary = record.place._replace(op=""), record.summary
        values = (summary.mean, summary.std, summary.min, summary.max)
        numbers = tuple(x if math.isfinite(x) else 0.0 for x in values)
        found.setdefault(place, SiteSignature(place.port, summary.shape, numbers))
    return found


def _dtypes(a: Side, b: Side, aligned: Alignment, steps: StepPair) -> list[tuple[str, str]]:
    """Return the types of activations and gradients in both runs; parameters often keep theirs when others change."""
    names = ("site", "port", "slot", "dtype")
    known = [
        {Place(*where): dtype for *where, dtype in zip(*(rows[n].to_pylist() for n in names), strict=True)}
        for rows in (step_rows(side.snapshot, names, at.step, at.phase) for side, at in zip((a, b), steps, strict=True))
    ]
    pairs = ((known[0].get(x), known[1].get(y)) for x, y in aligned.pairs.items() if x.port != "param")
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def _chosen(aligned: Alignment, sites: SiteSelection) -> Alignment:
    """Return the part of the alignment that the patterns match, by the names of either run."""
    if sites is None:
        return aligned
    known = [*aligned.pairs, *aligned.only_in_a, *aligned.pairs.values(), *aligned.only_in_b]
    meant = set(places_matching(sites, dict.fromkeys(known)))
    pairs = {a: b for a, b in aligned.pairs.items() if a in meant or b in meant}
    if not pairs:
        raise PatternError(f"what matches {sites} is in one run only: {', '.join(map(str, sorted(meant)[:3]))}")
    rest = (tuple(p for p in only if p in meant) for only in (aligned.only_in_a, aligned.only_in_b))
    only_in_a, only_in_b = rest
    return aligned._replace(pairs=pairs, only_in_a=only_in_a, only_in_b=only_in_b, ordered=aligned.ordered & set(pairs))


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
            shapes = record.summary.shape, other.summary.shape
            kept = common_elements(kept_a, kept_b, call_of(record), call_of(other), *shapes)
            pairs.append(compare_records(record, other, tolerance, kept))
    return pairs, len(a) - len(pairs), len(b) - len(pairs)


def _by_step(side: Side, steps: Sequence[PhaseStep], places: Iterable[Place]) -> Iterator[dict[Key, Record]]:
    """Yield the records of each step in order of execution; several steps are read at once, which is faster."""
    wanted = set(places)
    at_once = max(1, _ROWS_AT_ONCE // max(len(wanted), 1))
    for start in range(0, len(steps), at_once):
        part = steps[start : start + at_once]
        found: dict[PhaseStep, dict[Key, Record]] = {at: {} for at in part}
        for record in sorted(side.records(part), key=lambda r: (r.seq, r.rank)):
            place = record.place._replace(op="")
            if place in wanted and not record.recomputed:
                found[_step_of(record)].setdefault((record.rank, place, record.call), record)
        yield from found.values()
