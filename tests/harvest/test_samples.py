"""Samples of tables and lists, and how they are put together as batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.errors import HarvestError

ROWS = torch.arange(30.0).reshape(10, 3)


def harvest(data: Any, to: Path, **options: Any) -> tt.Harvest:
    return tt.harvest(nn.Identity(), data, ":output", to=to, progress=False, **options)


def values(acts: tt.Harvest) -> np.ndarray:
    """The rows in the order of the samples."""
    (batch,) = acts.batches(1000)
    return batch.values[np.argsort(batch.sample, kind="stable")]


@pytest.mark.parametrize("kind", ["parquet", "samples"])
def test_columns_of_lists_of_other_lengths_may_stay_in(kind: str, tmp_path: Path) -> None:
    """What no array can hold is left out, as texts are, where the model does not take it."""
    rows = [{"input": row.tolist(), "boxes": [[1.5, 2.0], [3.0]], "names": [["a"], []]} for row in ROWS]
    data: Any = rows
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), data := tmp_path / "rows.parquet")
    assert np.array_equal(values(harvest(data, tmp_path / "acts", batch_size=4)), ROWS)


def test_a_sample_without_an_entry_is_named(tmp_path: Path) -> None:
    """Samples that lack what the first of their batch has are refused, with the batch and the entry."""
    data = [{"input": row.numpy(), "mask": np.ones(3)} for row in ROWS]
    del data[6]["mask"]
    with pytest.raises(HarvestError, match=r"samples 4 to 7: .* no 'mask', .* give collate="):
        harvest(data, tmp_path / "acts", batch_size=4)


@pytest.mark.parametrize("address", ["rows/a.parquet", "rows", "rows/*.parquet", "rows/none.parquet"])
def test_parquet_files_at_an_address(address: str, tmp_path: Path) -> None:
    """Parquet files may lie wherever fsspec can read: a file, a folder, a pattern."""
    import fsspec

    store, place = fsspec.filesystem("memory"), f"/{tmp_path.name}"
    pq.write_table(pa.Table.from_pylist([{"input": row.tolist()} for row in ROWS]), tmp_path / "a.parquet")
    store.pipe(f"{place}/rows/a.parquet", (tmp_path / "a.parquet").read_bytes())
    url = f"memory:/{place}/{address}"
    if "none" in address:
        with pytest.raises(HarvestError, match="names no Parquet file: write a path"):
            harvest(url, tmp_path / "acts")
    else:
        assert np.array_equal(values(harvest(url, tmp_path / "acts", batch_size=4)), ROWS)


def test_sequences_of_vectors_are_padded(tmp_path: Path) -> None:
    """What has a vector for each token, as a tokenizer's offsets, is padded as the mask is."""
    data = [{"input": np.ones((n, 2), np.float32), "mask": np.ones(n)} for n in (3, 1, 2)]
    acts = harvest(data, tmp_path / "acts", batch_size=4, keep=tt.tokens(mask="mask"))
    assert sorted(zip(*((batch := next(acts.batches(9))).sample, batch.position), strict=True)) == [
        (0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1),
    ]  # fmt: skip
    data[1]["mask"] = None  # type: ignore[assignment]
    with pytest.raises(HarvestError, match=r"samples 0 to 2: every sample must have numbers in 'mask'"):
        harvest(data, tmp_path / "none", batch_size=4, keep=tt.tokens(mask="mask"))
