"""What is written is what the model computed: whatever the types, and whatever a user's function does with it."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harvest.subjects import make_data, make_model
from torch import Tensor, nn

import tensortap as tt
from tensortap.errors import HarvestError
from tensortap.harvest.rows import Array

Pair = namedtuple("Pair", "x y")


def harvest(model: Any, data: Any, *sites: str, to: Path, **options: Any) -> tt.Harvest:
    return tt.harvest(model, data, *(sites or (":output",)), to=to, progress=False, **options)


@pytest.mark.parametrize("kind", [torch.int32, torch.float64], ids=["as wide", "wider"])
def test_another_type_is_refused(kind: torch.dtype, tmp_path: Path) -> None:
    """A batch of which other elements come than of the first is refused, or rounded to the type that was chosen."""
    data = [torch.ones(2, 4), torch.full((2, 4), 7, dtype=kind)]
    model = nn.Identity()
    with pytest.raises(HarvestError, match=r'got \w+ for samples 2 to 3 after float32: choose .* dtype="float32"'):
        harvest(model, data, to=tmp_path / "acts")
    (batch,) = harvest(model, data, to=tmp_path / "f32", dtype="f32").batches(10, seed=None)
    assert sorted(batch.values[:, 0]) == [1, 1, 7, 7]


def test_a_function_may_change_what_it_is_given(tmp_path: Path) -> None:
    """A `keep=` function that works in place changes its own copy, and not what the model goes on with."""

    def centered(values: Array, batch: Any) -> Array:
        values -= values.mean(axis=-1, keepdims=True)
        return values

    data = [{"input_ids": torch.arange(8).reshape(2, 4)}]
    both = harvest(make_model(), data, "blocks.0", "blocks.1", to=tmp_path / "both", keep=centered)
    alone = harvest(make_model(), data, "blocks.1", to=tmp_path / "alone", keep=centered)
    (one,), (two,) = (acts.batches(99, "blocks.1", seed=None) for acts in (both, alone))
    assert one.values.tobytes() == two.values.tobytes()


@pytest.mark.parametrize("name", ["mean", "max", "topk"])
def test_float64_is_kept_whole(name: str, tmp_path: Path) -> None:
    """Means, maxima and the largest elements of float64 are computed in float64."""
    close = 1 + torch.tensor([[[0, 3, 1], [2, 1, 0]]], dtype=torch.float64) * 2.0**-50
    keep = {"mean": tt.pooled("mean"), "max": tt.pooled("max"), "topk": tt.top_k(1)}[name]
    (batch,) = harvest(nn.Identity(), [close], to=tmp_path / "acts", keep=keep).batches(9, seed=None)
    want = {"mean": close.mean(1), "max": close.amax(1), "topk": close.amax(2).reshape(-1, 1)}[name]
    assert batch.values.dtype == np.float64
    assert sorted(batch.values.ravel()) == sorted(want.numpy().ravel())


def test_one_sample_of_a_named_tuple_is_set_aside(tmp_path: Path) -> None:
    """Batches that are named tuples can be divided into samples."""

    class Refusing(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            if (x == 5).any():
                raise ValueError("five")
            return x + y

    x = torch.arange(8.0).reshape(4, 2)
    acts = harvest(Refusing(), [Pair(x, x), Pair(x + 9, x)], to=tmp_path / "acts")
    assert [each["sample"] for each in acts.set_aside] == [2]
    assert acts.samples == 7


@pytest.mark.parametrize("dtype", ["fp8", "float8_e5m2", "bf16", "f16", "f64", "int8", "uint16", "int64", "bool"])
def test_every_type_arrives_in_pytorch(dtype: str, tmp_path: Path) -> None:
    """What a harvest can hold its dataset gives as a tensor of the same type and bits."""
    acts = harvest(nn.Identity(), [torch.arange(8.0).reshape(4, 2)], to=tmp_path / "acts", dtype=dtype)
    (tensor,), (batch,) = acts.dataset(9), acts.batches(9)
    assert str(tensor.dtype).removeprefix("torch.") == str(batch.values.dtype)
    assert tensor.view(torch.uint8).numpy().tobytes() == batch.values.tobytes()


def test_a_model_of_other_modules_is_another_model(tmp_path: Path) -> None:
    """Of two models with the same weights, the activation function or its settings tell them apart."""
    linear, data = nn.Linear(4, 4), [torch.randn(2, 4)]
    first = harvest(nn.Sequential(linear, nn.LeakyReLU(0.1)), data, to=tmp_path / "acts")
    for other in (nn.Tanh(), nn.LeakyReLU(0.2)):
        with pytest.raises(HarvestError, match=f"fingerprint of the model is {first.plan.fingerprints['model']}"):
            harvest(nn.Sequential(linear, other), data, to=tmp_path / "acts")
    again = harvest(nn.Sequential(linear, nn.LeakyReLU(0.1)), data, to=tmp_path / "acts")
    assert again.plan == first.plan


def test_no_rows_are_not_dead_dimensions(tmp_path: Path) -> None:
    """A harvest whose mask leaves nothing is complete, has no rows, and calls no dimension dead."""
    from tensortap.harvest.summary import summarize_sites

    data = [{key: value * 0 for key, value in sample.items() if key != "text"} for sample in make_data(6)]
    acts = harvest(make_model(), data, "blocks.1", to=tmp_path / "acts", keep=tt.tokens(mask="attention_mask"))
    assert (acts.rows, acts.samples, list(acts.batches(8))) == (0, 6, [])
    assert summarize_sites(acts)[0].dead == []


@pytest.mark.parametrize("wrong", [{"axis": "c"}, {"axis": True}, {"mask": torch.ones(2)}, {"mask": 1.5}])
def test_what_is_no_axis_or_mask_is_refused_at_once(wrong: dict[str, Any]) -> None:
    """An axis is a number, a mask a name or a place."""
    for made in (tt.tokens, tt.pooled, lambda **options: tt.top_k(2, **options)):
        with pytest.raises(HarvestError, match=r"(axis|mask) must be .* write (axis|mask)="):
            made(**wrong)


def test_a_keep_that_was_not_called_is_refused(tmp_path: Path) -> None:
    """`keep=tt.tokens` is answered with tt.tokens()."""
    with pytest.raises(HarvestError, match=r"what tt\.pooled\(\) returns, got the function itself"):
        harvest(nn.Identity(), [torch.ones(2, 4)], to=tmp_path / "acts", keep=tt.pooled)


class Counting(nn.Module):
    """Counts its calls in one buffer, in place, and grows another one as long sequences come."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("places", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if x.shape[1] > len(self.places):
            self.places = torch.arange(float(x.shape[1]))
        return self.fc(x) + self.places[: x.shape[1], None] + self.calls


def test_buffers_are_left_as_they_were(tmp_path: Path) -> None:
    """What a forward pass writes to buffers, or puts in their place, is undone: the same call knows the model again."""
    model, data = Counting(), [torch.randn(2, length, 4) for length in (3, 5, 4)]
    first = harvest(model, data, to=tmp_path / "acts")
    assert model.calls == 0
    assert torch.equal(model.places, torch.zeros(1))
    assert harvest(model, data, to=tmp_path / "acts").plan == first.plan
    assert harvest(model, data, to=tmp_path / "again").statistics(":output").mean.tolist() == (
        first.statistics(":output").mean.tolist()
    )
