"""Measure the ways in which a harvest could write its vectors; `python benchmarks/harvest.py formats` runs it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch


def formats() -> None:
    """Ways of writing vectors in bf16: how fast they are written and read, and how large they are."""
    rows, width = 40_000, 384
    values = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    columns: dict[str, Any] = {
        "Parquet, fixed-length binary": pa.Array.from_buffers(pa.binary(2 * width), rows, [None, pa.py_buffer(bits)]),
        "Parquet, list of uint16": pa.FixedSizeListArray.from_arrays(pa.array(bits.reshape(-1)), width),
        "Parquet, list of float16": pa.FixedSizeListArray.from_arrays(
            pa.array(values.astype(np.float16).reshape(-1)), width
        ),
    }
    print(f"\nformats: {rows} rows of {width} bf16, MB/s of payload from the page cache")
    chosen = np.sort(np.random.default_rng(0).integers(0, rows, 256))
    with tempfile.TemporaryDirectory() as folder:
        for name, column in columns.items():
            table, path = pa.table({"values": column}), f"{folder}/a.parquet"
            wrote = best(lambda t=table, p=path: write_plain(t, p))
            got = best(lambda p=path: pq.read_table(p, memory_map=True, pre_buffer=False))
            few = best(lambda p=path: pq.read_table(p, memory_map=True, pre_buffer=False).take(chosen))
            size = Path(path).stat().st_size / bits.nbytes
            rates = f"{bits.nbytes / wrote / 1e6:>7,.0f} written {bits.nbytes / got / 1e6:>7,.0f} read"
            print(f"  {name:<30} {rates}   256 random rows {few * 1e3:6.1f} ms   size {size:.2f}")
            with pa.OSFile(f"{folder}/a.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as out:
                out.write_table(table)
        with pa.memory_map(f"{folder}/a.arrow") as file:
            few = best(lambda: pa.ipc.open_file(file).read_all().take(chosen))
        print(f"  Arrow IPC, memory map: 256 random rows {few * 1e3:.1f} ms")


def write_plain(table: pa.Table, path: str) -> None:
    """Write without compression or dictionaries."""
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, row_group_size=8192, **plain)


def best(function: Callable[[], object]) -> float:
    """The shortest of five times."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return min(times)
