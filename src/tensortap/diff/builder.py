"""Collect pairs by site, step by step, into the result of a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tensortap.diff.align import Alignment
from tensortap.diff.cause import Cause, Earlier, first_cause, port_of
from tensortap.diff.columnar import ColumnarResult
from tensortap.diff.pair import Pair, batch_of
from tensortap.diff.phases import PairedSteps
from tensortap.diff.records import to_the_last_bit
from tensortap.diff.result import Diff, PairExcess, PairsOnDemand, SiteDiff
from tensortap.errors import RunError
from tensortap.store.run import Run


class DiffBuilder:
    """Collect pairs by site, step by step."""

    def __init__(self, *, bitwise: bool = False) -> None:
        self._bitwise = bitwise
        self._sites: dict[tuple[str, str], SiteDiff] = {}
        self._batches: list[Any] = []
        self._first: Pair | None = None
        self._cause: Cause | None = None
        self._unequal: Pair | None = None
        self._alone = [0, 0]
        self._columns: PairExcess | None = None

    def add(self, pairs: Sequence[Pair], alone_a: int, alone_b: int) -> None:
        """Add the pairs of one step."""
        pairs = self._judged(pairs)
        self._alone = [self._alone[0] + alone_a, self._alone[1] + alone_b]
        self._cause = self._cause or first_cause(pairs)
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

    def _judged(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        return [to_the_last_bit(pair) for pair in pairs] if self._bitwise else pairs

    def put(self, found: ColumnarResult, load: Callable[[], Iterable[Sequence[Pair]]]) -> None:
        """Take over the result of a comparison by columns; `load` makes all pairs when they are needed."""
        self._sites = {(row.worst.site, row.worst.site_b): row for row in found.sites}
        self._first, self._unequal, self._cause = found.first, found.first_unequal, found.cause
        self._alone = list(found.alone)
        self._columns = found.excess
        rows = lambda: [batch_of(self._judged(pairs)) for pairs in load()]  # noqa: E731
        self._batches.append(PairsOnDemand(len(found.excess.site), rows))

    def _earlier(self, cause: Cause, paired: PairedSteps) -> Earlier:
        """Return which parts of the steps before the cause were compared."""
        if (cause.phase, cause.step) == paired.both[0][0]:
            return "nothing"
        return "updates" if any(port_of(site) == "update" for site, _ in self._sites) else "steps"

    def diff(self, a: Run, b: Run, aligned: Alignment, paired: PairedSteps, layouts: str = "") -> Diff:
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
        return Diff(
            a=a.path,
            b=b.path,
            rows=tuple(rows),
            first=self._first,
            cause=self._cause and replace(self._cause, earlier=self._earlier(self._cause, paired)),
            layouts=layouts,
            moved=next(((x.step, y.step) for x, y in paired.both if x.step != y.step), None),
            columns=self._columns,
            bitwise=self._bitwise,
            first_unequal=self._unequal,
            aligned_by=aligned.by,
            wrong_pairs=aligned.wrong,
            only_in_a=tuple(map(str, aligned.only_in_a)),
            only_in_b=tuple(map(str, aligned.only_in_b)),
            steps=tuple(at.step for at, _ in paired.both),
            steps_only_in_a=tuple(sorted(at.step for at in paired.only_in_a)),
            steps_only_in_b=tuple(sorted(at.step for at in paired.only_in_b)),
            paired=paired,
            alone_in_a=self._alone[0],
            alone_in_b=self._alone[1],
            dtypes={types: tuple(sites) for types, sites in other.items()},
            shapes=sum(r.worst.shape != r.worst.shape_b and r.worst.of != "shape" and not r.worst.kept for r in rows),
            batches=tuple(self._batches),
        )
