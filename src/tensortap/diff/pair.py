"""One record of a run paired with one of the other, and how far they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import pyarrow as pa

from tensortap import text
from tensortap.sinks.plain import PlainDict, plain
from tensortap.text import printable
from tensortap.types import DTYPES

SHORT: Final = {d.name: d.short for d in DTYPES}


@dataclass(frozen=True, slots=True)
class Pair:
    """One record of `a` and its partner in `b`. Differences of statistics are relative to their scale.

    `error` is the largest difference relative to scale, `excess` the same in multiples of the tolerance, and `of` the
    statistic that differs. Values that were not kept are None.
    """

    step: int
    rank: int
    site: str
    site_b: str
    call: int
    seq: int
    dtype: str
    dtype_b: str
    shape: tuple[int, ...]
    shape_b: tuple[int, ...]
    rtol: float
    atol: float
    error: float
    excess: float
    of: str
    note: str = ""
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    l1: float | None = None
    l2: float | None = None
    tv: float | None = None
    ks: float | None = None
    kept: str = ""
    elements: int = 0
    max_abs: float | None = None
    max_rel: float | None = None
    nl2: float | None = None
    cosine: float | None = None
    sqnr: float | None = None
    bit_equal: float | None = None
    step_b: int = -1  # the step of `b`
    ratio: float | None = None  # of the norms, b's to a's
    phase: str = ""
    hash_equal: float | None = None  # 1 where the content hashes are equal, 0 where not, None where one was not kept

    @property
    def differs(self) -> bool:
        """Whether it is beyond the tolerance."""
        return self.excess > 1

    @property
    def unequal(self) -> bool:
        """Whether anything at all differs: bits where elements were kept, else statistics and histogram."""
        bits = any(share is not None and share < 1 for share in (self.bit_equal, self.hash_equal))
        return bool(self.excess or self.error or self.tv) or bits

    @property
    def name(self) -> str:
        """The site, and its name in `b` when that is another."""
        call = f" call {self.call}" if self.call else ""
        other = "" if self.site == self.site_b else f" → {printable(self.site_b)}"
        return f"{printable(self.site)}{other}{call}"

    @property
    def how_much(self) -> str:
        """By how much, in words."""
        if self.note:
            return self.note
        if math.isinf(self.error):
            return "nothing but zeros in a, not so in b"
        what = "" if self.of == "elements" else f" in its {self.of}"
        off = f"off by {text.number(self.error)} of its scale{what}"
        return off if math.isinf(self.excess) else f"{off}, {times(self.excess)} the tolerance"

    @property
    def by_bits(self) -> bool:
        """Whether all its bits were compared, by hash or element by element, and not statistics alone."""
        return self.hash_equal is not None or self.kept == "full"

    @property
    def bound(self) -> str:
        """The tolerance, in words."""
        if not self.rtol and not self.atol:
            return f"none, {dtypes(self)} is to be equal"
        absolute = f" and {text.number(self.atol)}" if self.atol else ""
        return f"{text.number(self.rtol)} of the scale{absolute} ({dtypes(self)})"


SCHEMA: Final = pa.schema(
    [
        (field.name, kind)
        for field in fields(Pair)
        for kind in [
            pa.int64() if str(field.type) == "int"
            else pa.string() if str(field.type) == "str"
            else pa.list_(pa.int64()) if str(field.type).startswith("tuple")
            else pa.float64()
        ]
    ]
)  # fmt: skip


def pair_to_dict(pair: Pair) -> PlainDict:
    """Return a pair as plain values, with its verdict."""
    return PlainDict({name: plain(getattr(pair, name)) for name in SCHEMA.names} | {"differs": pair.differs})


def batch_of(pairs: Sequence[Pair]) -> Any:
    """Return pairs as rows."""
    columns = {name: [getattr(pair, name) for pair in pairs] for name in SCHEMA.names}
    return pa.RecordBatch.from_pydict(columns, SCHEMA)


def dtypes(pair: Pair) -> str:
    """Return the type, or both."""
    a, b = (SHORT.get(name, name) for name in (pair.dtype, pair.dtype_b))
    return a if a == b else f"{a}/{b}"


def times(excess: float) -> str:
    """Return a ratio as text, `206×`; above a million only that it is more."""
    return f"{text.number(excess)}×"
