"""What data may be: whatever people have at hand is taken as it is, or refused with what to write instead."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from harvest.subjects import contents
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tensortap as tt
from tensortap.errors import HarvestError

ROWS = torch.arange(30.0).reshape(10, 3)


def harvest(data: Any, to: Path, model: Any = None, site: str = ":output", **options: Any) -> tt.Harvest:
    return tt.harvest(nn.Identity() if model is None else model, data, site, to=to, progress=False, **options)


def values(acts: tt.Harvest) -> np.ndarray:
    """The rows in the order of the samples."""
    (batch,) = acts.batches(1000)
    return batch.values[np.argsort(batch.sample, kind="stable")]


def test_empty_batches_are_passed_over(tmp_path: Path) -> None:
    """A batch without samples, wherever it comes, loses nothing of what follows it."""
    batches = [ROWS[:0], ROWS[:4], ROWS[:0], ROWS[:0], ROWS[4:]]
    acts = harvest(iter(batches), tmp_path / "acts", shard_size=16, spread=1)
    assert np.array_equal(values(acts), ROWS)
    with pytest.raises(HarvestError, match="yields nothing"):
        harvest([ROWS[:0]] * 3, tmp_path / "none")


class Few(IterableDataset[Tensor]):
    """Samples that come one after another, with a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)


def test_an_iterable_dataset_with_a_length(tmp_path: Path) -> None:
    """A dataset that can only be gone through is not asked for single samples."""
    assert np.array_equal(values(harvest(Few(), tmp_path / "acts", batch_size=4)), ROWS)


@pytest.mark.parametrize("kind", ["batches", "samples"])
def test_bf16_stays_bf16(kind: str, tmp_path: Path) -> None:
    """A model in bf16 is given bf16, in batches as they come and put together of samples."""
    torch.manual_seed(0)
    model, rows = nn.Linear(3, 2).bfloat16(), ROWS.bfloat16()
    data = [rows[:5], rows[5:]] if kind == "batches" else TensorDataset(rows)
    got = values(harvest(data, tmp_path / "acts", model, batch_size=None if kind == "batches" else 5))
    with torch.no_grad():
        want = torch.cat([model(rows[:5]), model(rows[5:])])
    assert np.array_equal(got.astype(np.float32), want.float())


def test_types_that_a_file_cannot_hold_are_named(tmp_path: Path) -> None:
    """Small integers are kept as they are; complex numbers are refused with the site and what to write."""
    assert values(harvest([ROWS.short()], tmp_path / "a")).dtype == np.int16
    with pytest.raises(HarvestError, match=r":output has elements of complex64.*keep="):
        harvest([ROWS.to(torch.complex64)], tmp_path / "b")


@pytest.mark.parametrize("kind", ["python", "hf", "double", "float"])
def test_numbers_of_files_and_lists_fit_the_model(kind: str, tmp_path: Path) -> None:
    """Python's floats, and double columns, are given to a float32 model as float32."""
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), [{"input": row} for row in ROWS.tolist()]
    if kind == "hf":
        data = pytest.importorskip("datasets").Dataset.from_list(data)
    elif kind != "python":
        column = pa.array(ROWS.tolist(), pa.list_(pa.float64() if kind == "double" else pa.float32()))
        pq.write_table(pa.table({"input": column}), tmp_path / "rows.parquet")
        data = str(tmp_path / "rows.parquet")  # type: ignore[assignment]
    got = values(harvest(data, tmp_path / "acts", model, batch_size=5))
    with torch.no_grad():
        assert np.array_equal(got, torch.cat([model(ROWS[:5]), model(ROWS[5:])]))


def test_columns_keep_their_types(tmp_path: Path) -> None:
    """Integers and floats of a Parquet file come in the types that they have there, texts are left out."""
    table = {"input": pa.array([[1.5], [2.5]], pa.list_(pa.float32())), "text": pa.array(["a", "b"])}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    acts = harvest(tmp_path / "rows.parquet", tmp_path / "acts")
    assert acts.plan.sites[0].dtype == "float32"


LABELLED = TensorDataset(ROWS, torch.zeros(10, dtype=torch.int64))


@pytest.mark.parametrize("data", [LABELLED, DataLoader(LABELLED, 5)], ids=["dataset", "loader"])
def test_inputs_of_a_tuple_are_chosen_by_their_place(data: Any, tmp_path: Path) -> None:
    """Of batches with a label behind the input, inputs=[0] gives the input alone."""
    model = nn.Linear(3, 2)
    size = None if isinstance(data, DataLoader) else 5
    assert len(values(harvest(data, tmp_path / "acts", model, inputs=[0], batch_size=size))) == 10
    with pytest.raises(HarvestError, match=r"write inputs=\[0\]"):
        harvest(data, tmp_path / "none", model, batch_size=size)
    with pytest.raises(HarvestError, match=r"the batch has no \[2\]: its entries are 0 to 1"):
        harvest(data, tmp_path / "none", model, inputs=[2], batch_size=size)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 4)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.embed(ids)


IDS = (torch.arange(40).reshape(10, 4) * 7) % 20


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_tokens_are_found_where_they_are_said_to_be(kind: str, tmp_path: Path) -> None:
    """Token ids come from a batch that is a tensor of them, from a place in a tuple, or by their name."""
    made: dict[str, Any] = {"tensor": IDS, "tuple": (IDS, torch.ones(10, 4)), "dict": {"ids": IDS}}
    key = "ids" if kind == "dict" else 0
    acts = harvest([made[kind]], tmp_path / "acts", Words(), "embed", token_ids=key)
    (batch,) = acts.batches(100)
    assert np.array_equal(batch.token, IDS[batch.sample, batch.position])
    with pytest.raises(HarvestError, match="the batch has no 'tokens'"):
        harvest([made[kind]], tmp_path / "none", Words(), "embed", token_ids="tokens")


class Scan:
    """An object that is no tensor and says where it lies when it is printed, as images do."""

    def __init__(self, number: int) -> None:
        self.pixels = np.full(3, number, np.float32)


class Scans(Dataset[Scan]):
    def __init__(self, first: int = 0) -> None:
        self.first = first

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Scan:
        return Scan(self.first + index)


def stacked(samples: list[Scan]) -> Tensor:
    return torch.from_numpy(np.stack([sample.pixels for sample in samples]))


def doubled(samples: list[Scan]) -> Tensor:
    return stacked(samples) * 2


def scaled(samples: list[Scan], factor: float) -> Tensor:
    return stacked(samples) * factor


def scaling(factor: float) -> Any:
    return lambda samples: stacked(samples) * factor


def test_the_same_objects_are_the_same_data(tmp_path: Path) -> None:
    """Samples that are objects are told by what they hold, not by where they lie in memory."""
    harvest(Scans(), tmp_path / "acts", batch_size=2, collate=stacked)
    before = contents(tmp_path / "acts")
    harvest(Scans(), tmp_path / "acts", batch_size=2, collate=stacked)
    assert contents(tmp_path / "acts") == before
    with pytest.raises(HarvestError, match="fingerprint of the data"):
        harvest(Scans(1), tmp_path / "acts", batch_size=2, collate=stacked)


CHANGES: dict[str, Any] = {
    "function": (stacked, doubled),
    "partial": (functools.partial(scaled, factor=1.0), functools.partial(scaled, factor=2.0)),
    "closure": (scaling(1.0), scaling(2.0)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_collate_is_another_option(name: str, tmp_path: Path) -> None:
    """A collate function with another body, other bound arguments or another closure is refused."""
    first, other = CHANGES[name]
    for _ in range(2):
        harvest(Scans(), tmp_path / "acts", batch_size=2, collate=first)
    with pytest.raises(HarvestError, match="fingerprint of the options"):
        harvest(Scans(), tmp_path / "acts", batch_size=2, collate=other)


def test_another_keep_function_is_another_option(tmp_path: Path) -> None:
    """A function with other values in its closure keeps other rows."""

    def first(count: int) -> Any:
        return lambda array, batch: array[:, :count]

    harvest([ROWS], tmp_path / "acts", keep=first(2))
    harvest([ROWS], tmp_path / "acts", keep=first(2))
    with pytest.raises(HarvestError, match="fingerprint of the options"):
        harvest([ROWS], tmp_path / "acts", keep=first(1))


BATCHES = [ROWS[i : i + 2] for i in range(0, 10, 2)]


@pytest.mark.parametrize(
    "other",
    [[*BATCHES[:1], BATCHES[1] + 1, *BATCHES[2:]], [*BATCHES, ROWS[:2]], [BATCHES[0], *BATCHES[:0:-1]]],
    ids=["value", "more", "order"],
)
def test_other_batches_of_a_list_are_other_data(other: list[Tensor], tmp_path: Path) -> None:
    """A list of batches is told by its length and by batches from all over it, not by the first alone."""
    harvest(BATCHES, tmp_path / "acts")
    with pytest.raises(HarvestError, match="fingerprint of the data"):
        harvest(other, tmp_path / "acts")


def test_a_longer_loader_is_other_data(tmp_path: Path) -> None:
    """A loader that says how long it is is told by that too; one that shuffles is named as what it may be."""
    harvest(DataLoader(TensorDataset(ROWS), 2), tmp_path / "acts", inputs=[0])
    harvest(DataLoader(TensorDataset(ROWS), 2), tmp_path / "acts", inputs=[0])
    with pytest.raises(HarvestError, match="shuffle=False"):
        harvest(DataLoader(TensorDataset(torch.cat([ROWS, ROWS])), 2), tmp_path / "acts", inputs=[0])


def test_a_loader_draws_nothing_from_the_users_random_state(tmp_path: Path) -> None:
    """A loader draws a seed for each pass over it; the generator's state is afterwards what it was."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    harvest(DataLoader(TensorDataset(ROWS), 2), tmp_path / "acts", inputs=[0])
    assert torch.equal(torch.get_rng_state(), before)


def test_texts_with_a_collate_are_samples(tmp_path: Path) -> None:
    """A list of texts is a list of paths only where nothing turns texts into batches."""

    def lengths(texts: list[str]) -> Tensor:
        return torch.tensor([[float(len(each))] for each in texts])

    acts = harvest(["a", "bb", "ccc"], tmp_path / "acts", batch_size=2, collate=lengths)
    assert values(acts).tolist() == [[1.0], [2.0], [3.0]]


class Splits(dict[str, Any]):
    """What HF's load_dataset returns without split=."""


REFUSED: dict[str, Any] = {
    "one batch": ({"input": ROWS}, r"got an object of type dict: for one batch write \[data\]"),
    "splits": (
        Splits(train=[ROWS], test=[ROWS]),
        r'got an object of type Splits: choose one of its entries, data\["train"\]',
    ),
    "number": (3, "got an object of type int"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_data_says_what_to_write(name: str, tmp_path: Path) -> None:
    """A single batch and a dict of splits are refused before anything is done."""
    data, said = REFUSED[name]
    with pytest.raises(HarvestError, match=said):
        harvest(data, tmp_path / "acts")


def test_a_data_frame_says_what_to_write(tmp_path: Path) -> None:
    """Rows of a table are given as records."""
    pandas = pytest.importorskip("pandas")
    with pytest.raises(HarvestError, match=r'data\.to_dict\("records"\)'):
        harvest(pandas.DataFrame({"input": [1.0, 2.0]}), tmp_path / "acts")


class Broken(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if index == 3:
            raise ValueError("corrupt file")
        return ROWS[index]


def test_a_sample_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """An error of the user's dataset comes as it is, with the sample that was read."""
    with pytest.raises(ValueError, match="corrupt file") as error:
        harvest(Broken(), tmp_path / "acts", batch_size=2)
    assert "sample 3 of the data" in error.value.__notes__[0]


def make(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, width)


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)


@pytest.mark.parametrize("factory", [functools.partial(make, 2), functools.partial(make, width=2), Model])
def test_a_class_and_a_partial_make_a_model(factory: Any, tmp_path: Path) -> None:
    """A model's class, or a function with its arguments bound, is called as a function without arguments is."""
    assert harvest([ROWS], tmp_path / "acts", factory).rows == 10


def test_an_error_of_keep_is_not_called_the_models(tmp_path: Path) -> None:
    """What a `keep=` function raises is named as its own, with the site."""

    def divided(values: np.ndarray, batch: Any) -> np.ndarray:
        raise ZeroDivisionError("no rows")

    expected = r"^keep= raised on the batch of samples 0 to 4: ZeroDivisionError at :output: no rows"
    with pytest.raises(HarvestError, match=expected):
        harvest([ROWS[:5], ROWS[5:]], tmp_path / "acts", keep=divided)


def test_a_lack_of_memory_in_keep_sets_no_sample_aside(tmp_path: Path) -> None:
    """What the machine lacks ends the harvest as it is: no sample is to blame."""

    def hungry(values: np.ndarray, batch: Any) -> np.ndarray:
        if 7 in batch.samples:
            raise MemoryError("no room")
        return values

    with pytest.raises(MemoryError, match="no room"):
        harvest([ROWS[:5], ROWS[5:]], tmp_path / "acts", keep=hungry)


def test_samples_of_a_function_are_put_together(tmp_path: Path) -> None:
    """A function that yields samples is taken as the iterator that it returns: `batch_size` of them make a batch."""
    acts = harvest(lambda: iter(ROWS), tmp_path / "acts", batch_size=4)
    assert (acts.samples, acts.about["about"]["samples_per_batch"]) == (10, 4)
    assert np.array_equal(values(acts), ROWS)
    assert values(harvest(lambda: iter(ROWS), tmp_path / "acts", batch_size=4)).tobytes() == values(acts).tobytes()


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    """Sizes, seeds and places may be NumPy's, and one place needs no list; they are the same options."""
    data = [(ROWS, torch.ones(10))]
    first = harvest(data, tmp_path / "acts", inputs=np.int64(0), seed=np.int64(3))
    assert first.plan == harvest(data, tmp_path / "acts", inputs=[0], seed=3).plan
    assert harvest(ROWS, tmp_path / "more", batch_size=np.int64(4)).rows == 10


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0: write batch_size=32"),
        ({"batch_size": True}, "got True: write batch_size=32"),
        ({"inputs": [1.5]}, r"inputs must be names or places in the batch, got \[1.5\]"),
        ({"collate": 5}, "collate must be a function from a list of samples to a batch, got 5"),
        ({"to": None}, 'must lie in a folder or at a URL, got None: write to="acts"'),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    """What cannot be meant is refused before anything is done, with what to write."""
    with pytest.raises(HarvestError, match=said):
        harvest(ROWS, **{"to": tmp_path / "acts", **wrong})
    assert not list(tmp_path.iterdir())
