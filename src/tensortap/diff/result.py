"""The result of a comparison: by site, and as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tensortap import text
from tensortap.diff.cause import Cause
from tensortap.diff.pair import SCHEMA, SHORT, Pair, pair_to_dict
from tensortap.diff.phases import PairedSteps
from tensortap.sinks.plain import PlainDict, plain
from tensortap.store.arrays import array_of
from tensortap.text import printable

_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class SiteDiff:
    """One site over all steps and calls: its worst pair, its first beyond tolerance, and how many there are."""

    worst: Pair
    first: Pair | None
    pairs: int
    differing: int

    @property
    def site(self) -> str:
        """The site's name in `a`."""
        return self.worst.site

    @property
    def differs(self) -> bool:
        """Whether any of its pairs is beyond the tolerance."""
        return self.differing > 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        first = None if self.first is None else self.first.step
        said = {"pairs": self.pairs, "differing": self.differing, "first_step": first}
        return PlainDict(said | pair_to_dict(self.worst))


@dataclass(frozen=True, slots=True, eq=False)
class PairsOnDemand:
    """Pairs that were compared by columns: their number, and a function that makes a row of each when all are
    needed.
    """

    pairs: int
    load: Callable[[], Sequence[Any]]

    def __len__(self) -> int:
        return self.pairs


class PairExcess(NamedTuple):
    """Every pair in three columns: its site as a number into `sites`, its step in `a`, and times the tolerance."""

    sites: tuple[str, ...]
    site: npt.NDArray[Any]
    step: npt.NDArray[Any]
    excess: npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Diff:
    """The difference of two runs: true if they agree within the tolerance; iterating it gives the worst site first.

    >>> import tensortap as tt                                          # doctest: +SKIP
    >>> found = tt.diff("runs/fp32", "runs/bf16")                       # doctest: +SKIP
    >>> bool(found), found.first and found.first.site                   # doctest: +SKIP
    """

    a: str
    b: str
    rows: tuple[SiteDiff, ...]
    first: Pair | None
    first_unequal: Pair | None
    aligned_by: str
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    steps: tuple[int, ...]  # of `a`, in order of execution; a number twice where two phases have it
    steps_only_in_a: tuple[int, ...]
    steps_only_in_b: tuple[int, ...]
    paired: PairedSteps  # the same steps with their phases
    alone_in_a: int
    alone_in_b: int
    dtypes: Mapping[tuple[str, str], tuple[str, ...]]
    shapes: int
    batches: tuple[Any, ...]
    cause: Cause | None = None
    bitwise: bool = False
    layouts: str = ""  # how the ranks of each run lie, where whole tensors were put together from theirs
    moved: tuple[int, int] | None = None  # steps of different numbers that were paired, for their phase: the first two
    wrong_pairs: tuple[str, ...] = ()  # sites that order had paired, given up as nothing behind them differs
    columns: PairExcess | None = None  # where pairs were compared by columns

    def __bool__(self) -> bool:
        return self.first is None and not (self.bitwise and self.unpaired)

    def when(self, pair: Pair) -> str:
        """Return the step of a pair in words, with its phase where phases have numbers of their own."""
        return f"step {pair.step}{self.paired.suffix(pair.phase)}"

    @property
    def unpaired(self) -> bool:
        """Whether one run has sites, steps or records that the other has not."""
        only = (self.only_in_a, self.only_in_b, self.steps_only_in_a, self.steps_only_in_b)
        return any(only) or bool(self.alone_in_a or self.alone_in_b)

    def __repr__(self) -> str:
        return f"<Diff of {self.a} and {self.b}: {self.headline}>"

    def __iter__(self) -> Iterator[SiteDiff]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> SiteDiff:
        return self.rows[index]

    @property
    def differing(self) -> int:
        """How many sites differ beyond the tolerance."""
        return sum(row.differs for row in self.rows)

    @property
    def pairs(self) -> int:
        """How many pairs of records were compared."""
        return sum(len(batch) for batch in self.batches)

    @property
    def excess(self) -> PairExcess:
        """How many times the tolerance each pair is, in columns: without making a row of every pair where possible."""
        if self.columns is not None:
            return self.columns
        rows = self.table()
        site = pc.dictionary_encode(rows["site"]).combine_chunks()
        names = tuple(site.dictionary.to_pylist())
        return PairExcess(names, *(array_of(c) for c in (site.indices, rows["step"], rows["excess"])))

    def table(self) -> Any:
        """Return every pair as a row of a `pyarrow.Table`, in order of execution."""
        return pa.Table.from_batches(self._loaded(), SCHEMA)

    def _loaded(self) -> Iterator[Any]:
        for batch in self.batches:
            yield from batch.load() if isinstance(batch, PairsOnDemand) else (batch,)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; null for what is not finite or not known."""
        first, unequal = (pair and pair_to_dict(pair) for pair in (self.first, self.first_unequal))
        return plain(  # type: ignore[no-any-return]
            {
                "a": self.a,
                "b": self.b,
                "same": bool(self),
                "bitwise": self.bitwise,
                "first": first,
                "first_unequal": unequal,
                "cause": None if self.cause is None else self.cause.to_dict(),
                "explanation": self.explanation,
                "layouts": self.layouts,
                "aligned_by": self.aligned_by,
                "wrong_pairs": self.wrong_pairs,
                "sites": len(self.rows),
                "differing": self.differing,
                "pairs": self.pairs,
                "only_in_a": self.only_in_a,
                "only_in_b": self.only_in_b,
                "steps": self.steps,
                "steps_only_in_a": self.steps_only_in_a,
                "steps_only_in_b": self.steps_only_in_b,
                "alone_in_a": self.alone_in_a,
                "alone_in_b": self.alone_in_b,
                "dtypes": [{"a": a, "b": b, "sites": sites} for (a, b), sites in self.dtypes.items()],
                "shapes": self.shapes,
                "rows": [row.to_dict() for row in self.rows],
            }
        )

    @property
    def headline(self) -> str:
        """The one sentence: whether they agree, and if not where they first part and by how much."""
        if self.bitwise:
            return self._bits
        if self.first is None:
            exactly = "" if self.first_unequal else ", bit for bit as far as was recorded"
            return f"same within tolerance{exactly}: {many(len(self.rows), 'site')}, {many(len(self.steps), 'step')}"
        return f"differs first in {self.first.name} at {self.when(self.first)}: {self.first.how_much}"

    @property
    def _bits(self) -> str:
        """The one sentence of a comparison of bits."""
        compared = f"{many(len(self.rows), 'site')}, {many(len(self.steps), 'step')}"
        if self.first is None:
            if self.unpaired:
                return f"what both have is the same to the last bit ({compared}), but one has more than the other"
            return f"the same to the last bit: {compared}"
        phase = f" ({self.first.phase})" if self.first.phase else ""
        return f"not the same: first {self.first.name} at step {self.first.step}{phase}: {self.first.how_much}"

    @property
    def explanation(self) -> str:
        """Why nothing else can be compared: the runs read other batches or began with other parameters; else empty."""
        cause = self.cause
        if cause is None or cause.phase == "eval":  # the training that follows does not read what was evaluated
            return ""
        if cause.kind == "input":
            return f"the runs do not read the same batch at step {cause.step}: all that follows differs for that reason"
        at_first = (cause.phase, cause.step) == self.paired.both[0][0]
        began_apart = cause.kind == "parameter" and at_first and cause.rank is None
        if began_apart and cause.everywhere and len(cause.sites) > 1:
            return "the runs begin with other parameters, from another seed or checkpoint: all that follows differs"
        return ""

    def remarks(self) -> Iterator[str]:
        """Yield what else there is to say: one line each."""
        if self.explanation:
            yield self.explanation
            yield f"{self.differing} of {many(len(self.rows), 'site')} differ"
            return
        rough = sum(not row.worst.by_bits for row in self.rows) if self.bitwise else 0
        if rough:
            count = many(rough, "site")
            yield f"only statistics were compared of {count}: keep=[tt.stats(), tt.content_hash()] records every bit"
        if self.first and not self.bitwise:
            count = f"{self.differing} of {many(len(self.rows), 'site')} differ"
            yield f"{count}; the tolerance there is {self.first.bound}"
        if self.layouts:
            yield f"whole tensors were put together: {self.layouts}"
        if self.cause is not None and (self.layouts or self.first is None or self.cause.site != self.first.site):
            yield f"cause: {self.cause}"
        causes = self._causes()
        if causes:
            yield f"its parameters differ: {listed(causes)}"
        unequal = self.first_unequal  # merged statistics are rounded, and tell nothing about bits
        if unequal and unequal is not self.first and (unequal.by_bits or not self.layouts):
            yield f"not bit for bit the same from {unequal.name} at {self.when(unequal)} on"
        if self.paired.moved:
            yield self.paired.moved
        if self.aligned_by == "order":
            yield "names differ: sites were aligned by order of execution and shape"
        if self.wrong_pairs:
            count = many(len(self.wrong_pairs), "pair")
            names = listed(self.wrong_pairs)
            yield f"not compared, because all after them agrees, so they are not true pairs: {count}: {names}"
        for (a, b), sites in self.dtypes.items():
            yield f"{SHORT.get(a, a)} in a, {SHORT.get(b, b)} in b: {many(len(sites), 'site')}: {listed(sites)}"
        if relaid := sum(row.worst.shape != row.worst.shape_b and bool(row.worst.kept) for row in self.rows):
            yield f"channels first in one, last in the other, put in one order: {many(relaid, 'site')}"
        if self.shapes:
            yield f"another shape but as many elements, compared by statistics: {many(self.shapes, 'site')}"
        for run, sites in (("a", self.only_in_a), ("b", self.only_in_b)):
            if sites:
                yield f"only in {run}: {many(len(sites), 'site')}: {listed(sites)}"
        yield from self.paired.remarks()
        for run, alone in (("a", self.alone_in_a), ("b", self.alone_in_b)):
            if alone:
                yield f"only in {run}: {many(alone, 'record')} of sites that are in both (another call, rank or step)"

    def _causes(self) -> list[str]:
        """Return the parameters of the first module that differs, where they differ too by then."""
        if self.first is None or self.first.site.endswith(":param"):
            return []
        last, phase = self.first.step, self.first.phase
        module = self.first.site.rpartition(":")[0].partition("/")[0]
        below = f"{module}." if module else ""
        rows = ((row.site, row.first) for row in self.rows if row.site.endswith(":param") and row.first is not None)
        found = ((site, at) for site, at in rows if at is not None and at.step <= last and at.phase == phase)
        return [site for site, _ in found if site.startswith(below)]

    def __str__(self) -> str:
        lines = [f"a  {self.a}", f"b  {self.b}", self.headline, *self.remarks(), ""]
        if self.explanation:
            return "\n".join(lines[:-1])
        width = max((len(row.worst.name) for row in self.rows[:_SHOWN]), default=0)
        for row in self.rows[:_SHOWN]:
            lines.append(f"{row.worst.name:<{width}}  {self.when(row.worst)}  {verdict(row)}")
        if hidden := len(self.rows) - _SHOWN:
            lines += [f"… {many(hidden, 'more site')}"] if hidden > 0 else []
        return "\n".join(lines)


def verdict(row: SiteDiff) -> str:
    """Return one site in words."""
    if row.differs:
        return row.worst.how_much
    return "same" if not row.worst.unequal else f"within tolerance, off by {text.number(row.worst.error)} of its scale"


def many(count: int, noun: str) -> str:
    """Return a count with its noun: `1 site`, `2 sites`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first few of many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(printable, names[:most])) + more
