"""The training context of PyTorch: what is recorded, and that nothing is left behind."""

from __future__ import annotations

import json
import pickle
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

import tensortap as tt
from tensortap.adapters.torch.context.optimizer_events import are_same
from tensortap.adapters.torch.context.optimizers import parameters_of

REPLACED = [
    (F, "cross_entropy"), (F, "mse_loss"), (torch.autograd, "backward"), (torch.optim.Optimizer, "__init__"),
    (torch.optim.lr_scheduler.LRScheduler, "__init__"), (DataLoader, "__iter__"), (_BaseDataLoaderIter, "__next__"),
    (_BaseDataLoaderIter, "_next_index"), (nn.Module, "__init__"), (nn.init, "normal_"),
]  # fmt: skip


def train(model, *, epochs=2, shuffle=True, loss=None):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=8, shuffle=shuffle):
            optimizer.zero_grad()
            (loss or nn.CrossEntropyLoss())(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        schedule.step()


def classifier(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3), *more)


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    model = classifier(nn.Softmax(-1))
    with tt.watch(model, to=tmp_path_factory.mktemp("runs") / "a", context=True) as tap:
        train(model)
    return [row | {"data": json.loads(row["data"])} for row in tap.run.events().to_pylist()]


def of(events, kind):
    return [event for event in events if event["kind"] == kind]


def test_a_loss_call_is_described(events):
    """A loss call says what it was given, what produced it, and where it was called."""
    first = of(events, "loss")[0]
    data = first["data"]
    assert (first["name"], data["input"]["shape"], data["target"]["shape"]) == ("cross_entropy", [8, 3], [8])
    assert data["operations"][:2] == ["Softmax", "Addmm"] and data["softmax"] == [["Softmax", 1, 2, 3]]
    assert data["produced_by"].startswith("3.") and data["input"]["sums_to_one"] == [1]
    assert sum(data["target"]["counts"].values()) == 8 and data["chance"] > 0
    file, line = first["code"].rsplit(":", 1)
    assert file.endswith("test_context.py")
    assert "CrossEntropyLoss" in Path(__file__).read_text().splitlines()[int(line) - 1] and file.endswith(
        "test_context.py"
    )


def test_the_optimizer_and_its_rates(events):
    """An optimizer is told with its line and groups; a rate is told when it changes."""
    made, holds, rate = (of(events, kind)[0] for kind in ("optimizer", "holds", "rate"))
    assert made["name"] == "SGD" and made["data"]["groups"][0]["momentum"] == 0.5 and "test_context.py:" in made["code"]
    assert (holds["data"]["held"], holds["data"]["of"], holds["data"]["foreign"]) == (4, 4, 0)
    assert rate["step"] == 3 and rate["data"]["groups"][0]["lr"] == pytest.approx(0.01)
    assert of(events, "scheduler")[0]["name"] == "StepLR"
    assert of(events, "clip")[0]["data"]["factor"] < 0.1


def test_batches_carry_the_samples(events):
    """A batch says which samples of the loader's data set are in it."""
    indices = [tuple(event["data"]["indices"]) for event in of(events, "batch")]
    assert len(indices) == 6 and sorted(i for batch in indices[:3] for i in batch) == list(range(24))
    assert len({event["data"]["fingerprint"] for event in of(events, "batch")}) == 6


def test_the_loop(events):
    """What leads to a step is told once as long as it stays the same."""
    assert [event["data"]["gradients"] for event in of(events, "loop")] == [["fresh"]]
    assert of(events, "totals")[0]["data"]["steps"] == 6


def loop_of(tmp_path, body):
    model = classifier()
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    with tt.watch(model, to=tmp_path / "a", context=True) as tap:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(6):
            body(step, model, optimizer, lambda: F.cross_entropy(model(x), y))
    rows = tap.run.events().to_pylist()
    loops = [json.loads(row["data"])["gradients"] for row in rows if row["kind"] == "loop"]
    return loops, json.loads(rows[-1]["data"])


def test_gradients_that_are_never_reset(tmp_path):
    """A step on gradients of before is counted, however the script may reset them."""

    def body(step, model, optimizer, loss):
        loss().backward()
        optimizer.step()

    loops, totals = loop_of(tmp_path, body)
    assert loops[-1] == ["stale"] and totals["steps_on_stale_gradients"] == 5


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_reset_between_micro_batches(tmp_path, to_none):
    """Backward passes whose gradients are thrown away are counted."""

    def body(step, model, optimizer, loss):
        optimizer.zero_grad(set_to_none=to_none)
        loss().backward()
        if step % 3 == 2:
            optimizer.step()

    loops, totals = loop_of(tmp_path, body)
    assert loops[0] == ["fresh", "reset", "reset"] and totals["backwards_thrown_away"] == 4


def test_gradient_accumulation(tmp_path):
    """Gradients that are added on purpose are neither stale nor thrown away."""

    def body(step, model, optimizer, loss):
        loss().backward()
        if step % 3 == 2:
            optimizer.step()
            model.zero_grad()

    loops, totals = loop_of(tmp_path, body)
    assert loops == [["fresh", "added", "added"]]
    assert totals["backwards_thrown_away"] == totals["steps_on_stale_gradients"] == 0


def test_nothing_changes_and_nothing_is_left(tmp_path):
    """Weights and random numbers are as without us, and PyTorch's functions are its own afterwards."""
    before = [getattr(owner, name) for owner, name in REPLACED]
    plain = classifier()
    train(plain)
    expected = (torch.rand(3), [p.clone() for p in plain.parameters()])
    model = classifier()
    with tt.watch(model, to=tmp_path / "a", context=True):
        train(model)
        assert pickle.loads(pickle.dumps(F.cross_entropy)) is F.cross_entropy
        assert b"tensortap" not in pickle.dumps(model)
    assert torch.equal(torch.rand(3), expected[0])
    assert all(map(torch.equal, model.parameters(), expected[1]))
    assert [getattr(owner, name) for owner, name in REPLACED] == before


def test_an_error_of_ours_ends_the_context_only(tmp_path, monkeypatch):
    """What goes wrong inside is told as an event, and the training goes on."""
    monkeypatch.setattr("tensortap.adapters.torch.context.loss_events.describe_call", lambda *args: 1 / 0)
    model = classifier()
    with tt.watch(model, to=tmp_path / "a", context=True) as tap:
        train(model)
    assert [row["name"] for row in tap.run.events().to_pylist() if row["kind"] == "failed"] == ["ZeroDivisionError"]


def test_events_are_a_table_of_sql(tmp_path):
    """SQL finds events beside records, also after compaction."""
    model = classifier()
    with tt.watch(model, to=tmp_path / "a", context=True) as tap:
        train(model)
    asked = "select count(*) n, any_value(data ->> '$.reduction') r from events where kind = 'loss'"
    assert tap.run.sql(asked).to_pylist() == [{"n": 6, "r": "mean"}]


def test_parameters_that_are_gone_are_not_the_same():
    """An optimizer for new parameters is another training's, though they may have the ids of some that are gone."""
    held = parameters_of(torch.optim.SGD(kept := list(nn.Linear(2, 1).parameters()), lr=0.1))
    gone = {key: weakref.ref(nn.Parameter(torch.zeros(1))) for key in held}
    assert len(kept) == 2 and are_same(held, dict(held)) and not are_same(gone, held) and not are_same({}, held)
