"""The records of one place, or of one step, from every file that has any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tensortap.store.chosen import all_of, equal
from tensortap.store.run import Run
from tensortap.store.sources import PLAIN_RECORDS, Outline, dataset
from tensortap.types import Place
from tensortap.view.api.block import Triple
from tensortap.view.api.seen import Seen


def rows_of(
    run: Run, seen: Seen, columns: Sequence[str], *, place: Triple | None = None, first: int = 0, last: int = 1 << 62,
    ports: Sequence[str] = (), again: bool = False,
) -> Any:  # fmt: skip
    """Columns of the records of a place, or of all, from step `first` to `last`; recomputed ones only with `again`."""
    step = pc.field("step")
    chosen = all_of(
        [
            None if place is None else equal(Place(*place)),
            (step >= first) & (step <= last),
            pc.field("port").isin(list(ports)) if ports else None,
            None if again else ~pc.field("recomputed"),
        ]
    )
    names = [
        name
        for source in seen.sources
        for name, outline in source.segments.items()
        if _has(outline, place, first, last)
    ]
    tables = [_tail(source.rank, seen.tails[path], chosen) for source in seen.sources for path in source.tails
              if path in seen.tails]  # fmt: skip
    if names:
        tables.append(dataset(run.files, names, PLAIN_RECORDS).to_table(columns=list(columns), filter=chosen))
    found = [table.select(columns) for table in tables] or [PLAIN_RECORDS.empty_table().select(columns)]
    return pa.concat_tables(found).sort_by("step")


def _tail(rank: int, table: Any, chosen: Any) -> Any:
    """A tail's rows that pass, as a segment would give them."""
    ranks = pa.repeat(pa.scalar(rank, pa.int32()), len(table))
    found = table.append_column("rank", ranks).filter(chosen)
    return found.select(PLAIN_RECORDS.names).cast(PLAIN_RECORDS)


def _has(outline: Outline, place: Triple | None, first: int, last: int) -> bool:
    inside = any(run[0] <= last and run[1] >= first for run in outline.steps)
    return inside and (place is None or any(tuple(known[:3]) == place for known in outline.places))
