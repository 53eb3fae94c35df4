"""Reading a harvest: random order within a bounded memory, disjoint parts, and everybody else's readers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import duckdb
import ml_dtypes
import numpy as np
import polars as pl
import pyarrow.dataset
import pytest
import torch
from harvest.subjects import WIDTH, contents, make_data, make_model
from torch import nn
from torch.utils.data import DataLoader

import tensortap as tt
from tensortap.errors import HarvestError
from tensortap.harvest.window import ShardKey, windows

DOCUMENT = 32  # tokens in each


@pytest.fixture(scope="module")
def acts(tmp_path_factory: pytest.TempPathFactory) -> tt.Harvest:
    """96 documents of 32 tokens, whose vector is (document, position), in 6 parts of 4 shards."""
    grid = np.stack(np.meshgrid(np.arange(96.0), np.arange(DOCUMENT), indexing="ij"), axis=-1).astype(np.float32)
    return tt.harvest(
        nn.Identity(), list(grid), ":output", to=tmp_path_factory.mktemp("harvest") / "acts", batch_size=16,
        keep=tt.tokens(), shard_size=4 * DOCUMENT * 8, spread=4, progress=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tt.Harvest:
    return tt.harvest(
        make_model(), make_data(), "blocks.0", "blocks.1", to=tmp_path_factory.mktemp("harvest") / "small",
        keep=tt.tokens(mask="attention_mask"), dtype="bf16", batch_size=8, progress=False,
    )  # fmt: skip


@pytest.mark.parametrize("memory", ["1GB", "8kB", 1])
def test_every_row_comes_once(acts: tt.Harvest, memory: Any) -> None:
    """Whatever the memory, each row comes once, with its own values, in full batches but for the last."""
    batches = list(acts.batches(100, memory=memory))
    assert [len(batch) for batch in batches[:-1]] == [100] * (len(batches) - 1)
    for batch in batches:
        assert np.array_equal(batch.values, np.stack([batch.sample, batch.position], axis=1))
    places = {(int(s), int(p)) for batch in batches for s, p in zip(batch.sample, batch.position, strict=True)}
    assert len(places) == sum(map(len, batches)) == 96 * DOCUMENT


def test_the_seed_decides_the_order(acts: tt.Harvest) -> None:
    """The same seed gives the same order, another seed another."""
    first, again, other = (np.concatenate([b.sample for b in acts.batches(64, seed=s)]) for s in (3, 3, 4))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def neighbours(acts: tt.Harvest, memory: Any, seeds: int = 20) -> float:
    """The share of neighbouring rows that come from one document, over several seeds."""
    order = [np.concatenate([b.sample for b in acts.batches(64, seed=seed, memory=memory)]) for seed in range(seeds)]
    return float(np.mean([np.mean(rows[1:] == rows[:-1]) for rows in order]))


def test_neighbours_are_as_rare_as_chance_makes_them(acts: tt.Harvest) -> None:
    """With all shards in the window, rows of one document are neighbours as often as in a full shuffle.

    The number of such pairs in 20 passes of 3071 is about Poisson; four standard deviations are allowed.
    """
    chance = (DOCUMENT - 1) / (96 * DOCUMENT - 1)
    assert abs(neighbours(acts, "1GB") - chance) < 4 * (chance / (20 * 96 * DOCUMENT)) ** 0.5


def test_a_small_window_mixes_what_it_holds(acts: tt.Harvest) -> None:
    """With a quarter of the shards in the window, neighbours are no more frequent than the shards in it allow.

    A document lies in 4 shards. A window of w random shards of n holds on average 1 + 3 (w - 1) / (n - 1) of those a
    given row's document lies in, each with a quarter of its rows, among w / n of all rows.
    """
    shards = acts.shards([":output"])
    rows = 96 * DOCUMENT
    allowed = (1 + 3 * (6 - 1) / (len(shards) - 1)) * (DOCUMENT / 4) / (rows * 6 / len(shards))
    assert len(shards) == 24
    found = neighbours(acts, int(rows * 6.5 / 24 * 48 / 0.6))
    assert found < allowed + 4 * (allowed / (20 * rows)) ** 0.5
    assert found < 0.1  # read in order it would be 0.97


def test_rows_are_spread_while_they_are_written(acts: tt.Harvest) -> None:
    """Each document lies in all shards of its part, and a file in its own order is not in the documents' order."""
    table = pyarrow.dataset.dataset(acts.files()[0]).to_table()
    samples = table["sample"].to_numpy()
    assert np.mean(np.diff(samples) == 0) < 0.2
    parts = {shard["file"] for entry in acts.entries for shard in entry["shards"] if entry["part"] == 0}
    assert len(parts) == 4


def test_windows_are_bounded() -> None:
    """Shards are grouped so that their rows fit the memory; one that is larger goes alone."""
    keys = [ShardKey(0, n, rows) for n, rows in enumerate([5, 5, 5, 50, 5])]
    assert [[key.number for key in group] for group in windows(keys, 100, 10)] == [[0, 1], [2], [3], [4]]


def test_ranks_see_disjoint_parts(acts: tt.Harvest) -> None:
    """Three readers together see every row once."""
    seen = [
        (int(s), int(p))
        for rank in range(3)
        for batch in acts.batches(50, rank=rank, world=3)
        for s, p in zip(batch.sample, batch.position, strict=True)
    ]
    assert len(seen) == len(set(seen)) == 96 * DOCUMENT


@pytest.mark.parametrize("workers", [0, 2])
def test_as_an_iterable_dataset(acts: tt.Harvest, workers: int) -> None:
    """Workers of a DataLoader, on each of two ranks, see every row once; a second pass has another order."""
    rows = []
    for rank in range(2):
        loader = DataLoader(acts.dataset(64, ranks=(rank, 2)), batch_size=None, num_workers=workers)
        rows += [tuple(row) for batch in loader for row in batch.tolist()]
    assert len(rows) == len(set(rows)) == 96 * DOCUMENT
    dataset = acts.dataset(64)
    assert not torch.equal(next(iter(dataset)), next(iter(dataset)))


def test_sites_are_aligned(small: tt.Harvest) -> None:
    """Several sites of a batch belong to the same tokens; bf16 arrives as bf16 in PyTorch."""
    one = {
        tuple(k): v for b in small.batches(16, "blocks.1") for *k, v in zip(b.sample, b.position, b.values, strict=True)
    }
    for batch in small.batches(16, "blocks.0", "blocks.1:output"):
        for *place, values in zip(batch.sample, batch.position, batch["blocks.1:output"], strict=True):
            assert np.array_equal(one[tuple(place)], values)
    tensors = next(iter(small.dataset(8, "blocks.0", "blocks.1")))
    assert tensors["blocks.0:output"].dtype == torch.bfloat16
    with pytest.raises(HarvestError, match="name the sites"):
        small.batches(16)
    wrong: list[tuple[Any, int]] = [("all", 0), (0, 0), (4, -1)]
    for size, seed in wrong:
        with pytest.raises(HarvestError, match="must be"):
            small.batches(size, "blocks.0", seed=seed)
    with pytest.raises(HarvestError, match=r"has no site 'blocks\.9'"):
        small.dataset(16, "blocks.9")


def test_everybody_reads_it(small: tt.Harvest) -> None:
    """pyarrow, Polars, DuckDB and HF datasets read the shards with their default settings, all columns."""
    import datasets

    files = small.files("blocks.0")
    want = {(int(s), int(p)): v.tobytes() for b in small.batches(16, "blocks.0")
            for s, p, v in zip(b.sample, b.position, b.values, strict=True)}  # fmt: skip
    columns = ["sample", "position", "token", "site", "values"]
    datasets.disable_progress_bars()
    tables: dict[str, list[Any]] = {
        "pyarrow": [tuple(row.values()) for row in pyarrow.dataset.dataset(files).to_table().to_pylist()],
        "polars": pl.read_parquet(os.path.dirname(files[0]) + "/*.parquet").rows(),  # noqa: PTH120
        "duckdb": duckdb.sql(f"SELECT * FROM read_parquet({files})").fetchall(),
        "datasets": [tuple(row.values()) for row in datasets.Dataset.from_parquet(files, cache_dir=f"{small.path}-hf")],
    }
    assert pl.read_parquet(files[0]).columns == columns
    for name, rows in tables.items():
        assert {(row[0], row[1]): bytes(row[4]) for row in rows} == want, name
        assert {row[3] for row in rows} == {"blocks.0:output"}, name
    vector = np.frombuffer(tables["duckdb"][0][4], ml_dtypes.bfloat16)
    assert vector.shape == (WIDTH,)


def test_a_damaged_shard_is_named(small: tt.Harvest, tmp_path: Path) -> None:
    """A shard that is missing or cut is named."""
    acts = tt.harvest(nn.Identity(), [torch.ones(4, 3)], ":output", to=tmp_path / "acts", progress=False)
    shard = Path(acts.files()[0])
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(HarvestError, match=f"{shard.name} is damaged"):
        list(acts.batches(2))
    shard.unlink()
    with pytest.raises(HarvestError, match=f"{shard.name} is in the manifest and missing"):
        list(acts.batches(2))
    with pytest.raises(HarvestError, match="holds no harvest"):
        tt.open_harvest(tmp_path)


def test_torchrun_processes_share_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that torchrun launches do every n-th part each, and the last to end finishes the harvest."""
    options: dict[str, Any] = {"keep": tt.tokens(mask="attention_mask"), "batch_size": 4, "progress": False}
    torch.set_num_threads(1)
    calls = []
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        model = make_model()
        acts = tt.harvest(model, make_data(), "blocks.0", to=tmp_path / "two", **options)
        assert acts.complete == (rank == 0)
        calls.append(model.blocks[0].calls)
    assert sum(calls) == 15 + 1  # the first rank also ran a batch for the plan
    monkeypatch.undo()
    tt.harvest(make_model(), make_data(), "blocks.0", to=tmp_path / "one", **options)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_wrong_readers_are_named(small: tt.Harvest) -> None:
    """No readers at all, and a dataset without a seed, are refused where they are asked for."""
    with pytest.raises(HarvestError, match="world must be at least 1, got 0"):
        small.batches(8, "blocks.0", world=0)
    with pytest.raises(HarvestError, match="seed must be a whole number of at least 0, got None: write seed=0"):
        small.dataset(8, "blocks.0", seed=None)  # type: ignore[arg-type]


class First(nn.Module):
    """Returns a tuple, of which only one entry is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.fc(x), None


def test_a_module_names_its_only_site(small: tt.Harvest, tmp_path: Path) -> None:
    """The name that a site was chosen by reads it, where it is the only one; where not, it has to be said."""
    acts = tt.harvest(First(), [torch.ones(2, 4)], "", to=tmp_path / "acts", progress=False)
    assert acts.sites == [":output[0]"]
    assert acts.site("").width == 3
    with pytest.raises(HarvestError, match=r"name the site to read, to_ray\('blocks.0:output'\)"):
        small.to_ray()
