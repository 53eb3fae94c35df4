"""The rows of tables as samples: Parquet files, on this machine or at an address, and Ray Datasets."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from tensortap.errors import HarvestError
from tensortap.harvest.batch import array_or_object
from tensortap.harvest.staging import reading

_REMOTE: Final = "://"


class ParquetRows(Sequence[Mapping[str, Any]]):
    """The rows of Parquet files as samples. One row group is held at a time."""

    def __init__(self, paths: list[str]) -> None:
        self._open = _open_parquet
        self._paths = paths
        self._groups: list[tuple[str, int]] = []
        ends = [0]
        for path in paths:
            with _open_parquet(path) as file:
                for group in range(file.num_row_groups):
                    self._groups.append((path, group))
                    ends.append(ends[-1] + file.metadata.row_group(group).num_rows)
        self._ends = np.array(ends)
        self._held: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        group = int(np.searchsorted(self._ends, index, side="right")) - 1
        if self._held[0] != group:
            path, number = self._groups[group]
            with self._open(path) as file:
                self._held = (group, file.read_row_group(number))
        return _row(self._held[1], index - int(self._ends[group]))


class RayRows(Sequence[Mapping[str, Any]]):
    """The rows of a Ray Dataset as samples, by its blocks in the object store. One block is held at a time."""

    def __init__(self, dataset: Any) -> None:
        blocks = dataset.materialize()
        self._refs = blocks.to_arrow_refs()
        self._held: tuple[int, Any] = (-1, None)
        self._ends = np.cumsum([0, *(self._block(i).num_rows for i in range(len(self._refs)))])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        block = int(np.searchsorted(self._ends, index, side="right")) - 1
        return _row(self._block(block), index - int(self._ends[block]))

    def _block(self, number: int) -> Any:
        if self._held[0] != number:
            import ray

            self._held = (number, ray.get(self._refs[number]))
        return self._held[1]


def _row(table: Any, number: int) -> dict[str, Any]:
    return {name: _typed(table.column(name)[number]) for name in table.column_names}


def _typed(scalar: Any) -> Any:
    """Return a value of a table as an array; floats in the column's own type, integers as int64."""
    import pyarrow as pa

    kind, value = scalar.type, scalar.as_py()
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    if value is not None and pa.types.is_floating(kind):
        found = array_or_object(value)
        return found if found.dtype.hasobject else found.astype(f"f{kind.bit_width // 8}")
    return array_or_object(value)


def _open_parquet(path: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path if _REMOTE not in path else _store_of(path)[0].open(path, "rb"))
    except pa.ArrowInvalid:
        raise HarvestError(
            f"{path} is not a Parquet file, or it is damaged: text as data names Parquet files; what a program makes "
            "is given itself, on the command line as --data MODULE:FUNCTION"
        ) from None


def parquet_paths(data: Any) -> list[str]:
    """Return the Parquet files that a path, a pattern or a folder names, or several of them."""
    given = [data] if isinstance(data, (str, os.PathLike)) else list(data)
    found = [path for each in given for path in expanded(os.fspath(each))]
    if not found:
        raise HarvestError(
            f"data={data!r} names no Parquet file: write a path, a folder or a pattern of files that are there, such "
            'as "docs/*.parquet"'
        )
    return found


def expanded(path: str) -> list[str]:
    """Return the files that a path or an address, a pattern or a folder names."""
    if _REMOTE in path:
        return _expanded_address(path)
    if os.path.isdir(path):  # noqa: PTH112
        path = f"{path}/**/*.parquet"
    if glob.has_magic(path):
        return sorted(glob.glob(path, recursive=True))  # noqa: PTH207
    return [path] if os.path.exists(path) else []  # noqa: PTH110


def _expanded_address(address: str) -> list[str]:
    store, root = _store_of(address)
    with reading(address):
        if store.isdir(root):
            root = f"{root}/**/*.parquet"
        found = store.glob(root) if glob.has_magic(root) else [root] if store.exists(root) else []
    return sorted(store.unstrip_protocol(name) for name in found)


def _store_of(address: str) -> tuple[Any, str]:
    """Return the file system that an address names, and the path in it."""
    from fsspec.core import url_to_fs  # loads asyncio and more: not for those who read from their own disk

    try:
        return url_to_fs(address)  # type: ignore[no-any-return]
    except (ValueError, ImportError) as error:
        raise HarvestError(f"the data {address!r} cannot be read: {error}") from error
