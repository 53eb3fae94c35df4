"""Measure the ways in which a harvest could write its vectors; `python benchmarks/harvest.py formats` runs it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tensortap.harvest.rows import Ints
from tensortap.harvest.shard_file import ShardFile
from tensortap.harvest.window import gather
from tensortap.store.files import Files

ROWS, WIDTH, FEW = 40_000, 384, 256


class Way(NamedTuple):
    """One way: how a file is written, read as a whole, and a few rows of it are read."""

    write: Callable[[str], object]
    read: Callable[[str], object]
    few: Callable[[str], object]


def formats() -> None:
    """Ways of writing vectors in bf16: how fast they are written and read, random rows, and the size."""
    values = torch.from_numpy(np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32))
    chosen = np.sort(np.random.default_rng(0).integers(0, ROWS, FEW))
    payload = 2 * ROWS * WIDTH
    print(f"\nformats: {ROWS} rows of {WIDTH} bf16, MB/s of payload in the page cache; {FEW} random rows")
    with tempfile.TemporaryDirectory() as folder:
        for name, way in ways(values.to(torch.bfloat16), values.numpy(), chosen).items():
            path = f"{folder}/{name}"
            wrote, got, few = (best(lambda call=call, path=path: call(path)) for call in way)
            rates = f"{payload / wrote / 1e6:>7,.0f} written {payload / got / 1e6:>7,.0f} read"
            print(f"  {name:<42} {rates}  rows {few * 1e3:7.2f} ms  size {Path(path).stat().st_size / payload:.2f}")


def ways(values: torch.Tensor, floats: Any, chosen: Ints) -> dict[str, Way]:
    """Return what is compared, by name."""
    bits = values.view(torch.uint16).numpy()
    size = 2 * WIDTH
    columns: dict[str, Any] = {
        "Parquet, fixed-length binary": pa.Array.from_buffers(pa.binary(size), ROWS, [None, pa.py_buffer(bits)]),
        "Parquet, list of uint16": pa.FixedSizeListArray.from_arrays(pa.array(bits.reshape(-1)), WIDTH),
        "Parquet, list of float16": pa.FixedSizeListArray.from_arrays(
            pa.array(floats.astype(np.float16).reshape(-1)), WIDTH
        ),
    }
    tables = {name: pa.table({"values": column}) for name, column in columns.items()}
    found = {
        name: Way(
            lambda path, table=table: write_plain(table, path),
            lambda path: pq.read_table(path, memory_map=True, pre_buffer=False),
            lambda path: pq.read_table(path, memory_map=True, pre_buffer=False).take(chosen),
        )
        for name, table in tables.items()
    }
    binary = tables["Parquet, fixed-length binary"]
    everything = np.arange(ROWS)
    found["the same, mapped as a harvest reads it"] = Way(
        lambda path: write_plain(binary, path),
        lambda path: mapped_rows(path, everything, size),
        lambda path: mapped_rows(path, chosen, size),
    )
    found["Arrow IPC"] = Way(
        lambda path: write_ipc(binary, path),
        lambda path: pa.ipc.open_file(pa.OSFile(path)).read_all(),
        lambda path: pa.ipc.open_file(pa.memory_map(path)).read_all().take(chosen),
    )
    found["safetensors"] = Way(
        lambda path: save_file({"values": values}, path),
        lambda path: load_file(path)["values"].clone(),  # else only mapped
        lambda path: slices(path, chosen),
    )
    return found


def mapped_rows(path: str, rows: Ints, size: int) -> Any:
    """Copy some rows from where they lie in a mapped file."""
    runs = ShardFile(Files(str(Path(path).parent)), path).runs("values", size)
    addresses = np.concatenate([np.arange(run.rows, dtype=np.int64) * size + run.address for run in runs])
    out = np.empty((len(rows), size // 2), np.uint16)
    gather(out, addresses[rows])
    return out


def slices(path: str, rows: Ints) -> Any:
    """Read some rows of a safetensors file."""
    with safe_open(path, "pt") as file:
        part = file.get_slice("values")
        return torch.stack([part[row] for row in rows.tolist()])


def write_plain(table: pa.Table, path: str) -> None:
    """Write without compression or dictionaries, a column of a row group as one page, as a harvest does."""
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, row_group_size=8192, data_page_size=1 << 30, **plain)


def write_ipc(table: pa.Table, path: str) -> None:
    """Write as an Arrow file."""
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)


def best(function: Callable[[], object]) -> float:
    """The shortest of five times."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return min(times)
