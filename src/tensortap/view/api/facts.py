"""What is told of each place beside its name: type, shape, calls, histogram; from the last files backwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tensortap.store.catalog import PLAIN_RECORDS, dataset
from tensortap.store.run import Run
from tensortap.view.api.block import Triple
from tensortap.view.api.seen import Seen

_COLUMNS: Final = ("site", "port", "slot", "call", "dtype", "shape", "hist_offset")
_LOOKED_AT: Final = 8  # files whose last step alone is looked at, before whole ones are
Fact = dict[str, Any]


def facts_of(run: Run, seen: Seen) -> dict[Triple, Fact]:
    """The facts of every place, as of the last record that was found of it."""
    found: dict[Triple, Fact] = {}
    for table in _parts(run, seen, found):
        for triple, fact in _of_table(table).items():
            found.setdefault(triple, fact)
        if len(found) >= len(seen.row):
            break
    return found


def _parts(run: Run, seen: Seen, found: dict[Triple, Fact]) -> Iterator[Any]:
    """Rows to look at, the latest first: tails, the last steps of some segments, then whatever has unknown places."""
    for table in seen.tails.values():
        yield table.select(_COLUMNS).cast(pa.schema([PLAIN_RECORDS.field(name) for name in _COLUMNS]))
    segments = [
        (name, outline) for source in seen.sources for name, outline in source.segments.items() if outline.steps
    ]
    segments.sort(key=lambda item: -item[1].steps[-1][1])
    for name, outline in segments[:_LOOKED_AT]:
        yield _read(run, name, pc.field("step") == outline.steps[-1][1])
    for name, outline in segments:
        missing = {str(place[0]) for place in outline.places if tuple(place[:3]) not in found}
        if missing:
            yield _read(run, name, pc.field("site").isin(sorted(missing)))


def _read(run: Run, name: str, chosen: Any) -> Any:
    return dataset(run.files, [name], PLAIN_RECORDS).to_table(columns=list(_COLUMNS), filter=chosen)


def _of_table(table: Any) -> dict[Triple, Fact]:
    """The last row of each place; of the calls the highest."""
    histogram = pc.is_valid(table["hist_offset"]).to_pylist()
    found: dict[Triple, Fact] = {}
    for site, port, slot, call, dtype, shape, has in zip(
        *(table[name].to_pylist() for name in _COLUMNS[:-1]), histogram, strict=True
    ):
        calls = max(call + 1, found.get((site, port, slot), {}).get("calls", 0))
        found[site, port, slot] = {"calls": calls, "dtype": dtype, "shape": shape, "histogram": has}
    return found
