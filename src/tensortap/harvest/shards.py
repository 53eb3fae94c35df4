"""Write the rows of one part: spread over its shards by a seeded random number for each row, block by block.

A shard is a Parquet file of one site. Its rows come from everywhere in the part, and those of a block are shuffled
too, so that any reader who goes through the file in order sees the data set in random order.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tensortap.errors import HarvestError
from tensortap.harvest.dtypes import NATIVE
from tensortap.harvest.plan import HarvestPlan, SitePlan
from tensortap.harvest.rows import Array, Ints, KeptRows, joined, mixed
from tensortap.harvest.statistics import SiteStatistics

_NUMBERED: Final = re.compile(r"part-\d{6,}-(\d{2,9})\.parquet$")
VALUES: Final = "values"
INDICES: Final = "indices"
_ONE_PAGE: Final = 1 << 30  # a column of a row group is one page: its vectors lie in the file in one run
_ORDER: Final = 0x5EED  # so that the order in a block has nothing to do with the shard a row is in


def schema_of(site: SitePlan) -> pa.Schema:
    """Return the columns of a shard. A vector is one run of bytes: Parquet's lists take ten times as long to read."""
    itemsize = NATIVE[site.dtype].itemsize
    fields = [
        pa.field("sample", pa.int64(), nullable=False),
        pa.field("position", pa.int32()),
        pa.field("token", pa.int64()),
        pa.field("site", pa.dictionary(pa.int8(), pa.string()), nullable=False),
        pa.field(VALUES, pa.binary(site.width * itemsize), nullable=False),
    ]
    if site.indices:
        fields.append(pa.field(INDICES, pa.binary(4 * site.indices), nullable=False))
    about = {"site": site.site, "dtype": site.dtype, "width": str(site.width)}
    return pa.schema(fields, metadata={f"tensortap.{key}": value for key, value in about.items()})


class ShardWriter:
    """One shard of one site, in a file that nobody reads yet."""

    def __init__(self, path: Path, site: SitePlan, block_rows: int, seed: int) -> None:
        self.path = path
        self.rows = 0
        self._site = site
        self._schema = schema_of(site)
        self._block_rows = block_rows
        self._seed = seed
        self._waiting: list[KeptRows] = []
        self._count = 0
        self._file: pq.ParquetWriter | None = None

    def add(self, rows: KeptRows) -> SiteStatistics | None:
        """Add rows; when a block is full, write it and return its statistics."""
        self._waiting.append(rows)
        self._count += len(rows)
        return self._write() if self._count >= self._block_rows else None

    def close(self) -> SiteStatistics | None:
        """Write what is left, and the file's end."""
        found = self._write() if self._count else None
        if self._file is not None:
            self._file.close()
        return found

    def abandon(self) -> None:
        """Close the file without caring what is in it."""
        if self._file is not None:
            self._file.close()

    def _write(self) -> SiteStatistics:
        block = joined(self._waiting)
        block = block.take(np.argsort(mixed(self._seed ^ _ORDER, block.sample, block.position), kind="stable"))
        self._waiting, self._count = [], 0
        self.rows += len(block)
        if self._file is None:
            self._file = pq.ParquetWriter(
                self.path, self._schema, compression={"sample": "zstd", "position": "zstd", "token": "zstd"},
                use_dictionary=["site"], write_statistics=["sample", "position", "token"], data_page_size=_ONE_PAGE,
            )  # fmt: skip
        self._file.write_table(table_of(block, self._site, self._schema), row_group_size=len(block))
        return SiteStatistics.of(block.values)


class PartWriter:
    """All shards of one part."""

    def __init__(self, folder: Path, plan: HarvestPlan, part: int) -> None:
        self.statistics = {site.site: SiteStatistics.empty(site.width) for site in plan.sites}
        self._plan = plan
        self._sites = {site.site: site for site in plan.sites}
        self._shards = {
            site.site: [
                ShardWriter(folder / f"{site.folder}-{shard_name(part, n)}", site, plan.block_rows, plan.seed)
                for n in range(plan.shards_per_part)
            ]
            for site in plan.sites
        }

    def add(self, site: str, rows: KeptRows) -> None:
        """Spread the rows of a batch over the shards of their site."""
        shards = self._shards[site]
        if len(shards) == 1:
            self._count(site, shards[0].add(rows))
            return
        target = (mixed(self._plan.seed, rows.sample, rows.position) % np.uint64(len(shards))).astype(np.uint8)
        spread = rows.take(np.argsort(target, kind="stable"))
        ends = np.cumsum(np.bincount(target, minlength=len(shards)))
        for shard, begin, end in zip(shards, [0, *ends[:-1]], ends, strict=True):
            if begin < end:
                self._count(site, shard.add(spread.take(slice(begin, end))))

    def close(self) -> Iterator[tuple[SitePlan, int, ShardWriter]]:
        """Finish the files and yield those that hold anything, in order."""
        for site, shards in self._shards.items():
            for number, shard in enumerate(shards):
                self._count(site, shard.close())
                if shard.rows:
                    yield self._sites[site], number, shard

    def abandon(self) -> None:
        """Close every file."""
        for shard in (shard for shards in self._shards.values() for shard in shards):
            shard.abandon()

    def _count(self, site: str, block: SiteStatistics | None) -> None:
        if block is not None:
            self.statistics[site].add(block)


def shard_name(part: int, number: int) -> str:
    """Return a shard's file name."""
    return f"part-{part:06d}-{number:02d}.parquet"


def shard_number(name: str) -> int:
    """Return a shard's number in its part, from its file name.

    >>> shard_number("data/fc-output/" + shard_name(12, 3))
    3
    """
    found = _NUMBERED.search(name)
    if found is None:
        raise HarvestError(f"a shard must be named such as {shard_name(12, 3)}, got {name!r}: the manifest is damaged")
    return int(found[1])


def table_of(rows: KeptRows, site: SitePlan, schema: pa.Schema) -> pa.Table:
    """Return rows as a table that shares the values' memory."""
    columns = [
        _numbers(rows.sample), _or_null(rows.position, np.int32), _or_null(rows.token, np.int64),
        _always(site.site, len(rows)), _bytes(rows.values, schema.field(VALUES).type),
    ]  # fmt: skip
    if rows.indices is not None:
        columns.append(_bytes(rows.indices, schema.field(INDICES).type))
    return pa.Table.from_arrays(columns, schema=schema)


def sealed_file(path: Path) -> tuple[int, str]:
    """Bring a finished file to the disk, and return its size and its hash."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return file.tell(), digest


# `pa.array` would do for the functions below, but it imports pandas when it is first called: a fifth of a second of
# processor time in every worker, while the model computes.


def _numbers(values: Array, mask: pa.Buffer | None = None) -> pa.Array:
    dense = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(dense.dtype), len(dense), [mask, pa.py_buffer(dense)])


def _or_null(values: Ints, kind: type[np.signedinteger[Any]]) -> pa.Array:
    """Return numbers in a type; those below zero are missing."""
    there = values >= 0
    mask = None if there.all() else pa.py_buffer(np.packbits(there, bitorder="little"))
    narrow = values.astype(kind)
    if not np.array_equal(narrow, values):
        raise HarvestError(f"a position must be below {np.iinfo(kind).max}, got {values.max()}")
    return _numbers(narrow, mask)


def _always(text: str, count: int) -> pa.Array:
    """Return a column that holds one text in every row."""
    encoded = text.encode()
    offsets = pa.py_buffer(np.array([0, len(encoded)], np.int32))
    only = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(encoded))
    return pa.DictionaryArray.from_arrays(_numbers(np.zeros(count, np.int8)), only)


def _bytes(values: Any, kind: pa.DataType) -> pa.Array:
    dense = np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(dense), [None, pa.py_buffer(dense.view(np.uint8).reshape(-1))])
