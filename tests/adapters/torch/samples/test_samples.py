"""Which sample did it: ranking, where samples come from, and the findings that name them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

import tensortap as tt
from tensortap.adapters.torch.samples.batches import GivenBatch, RecentBatches, describe_sample
from tensortap.adapters.torch.samples.rows import LossCall, losses_of, sample_numbers
from tensortap.adapters.torch.samples.suspects import LossHistory, rank
from tensortap.view.agent.story import story

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def culprits():
    spec = importlib.util.spec_from_file_location("benchmark_culprits", ROOT / "benchmarks" / "culprits.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("model", "loader", "poison"),
    [
        ("mlp", "shuffled", "nan"),
        ("cnn, batch norm", "dict batches", "inf"),
        pytest.param("regression", "batch sampler", "scaled", marks=pytest.mark.thorough),
        ("mlp", "shuffled", "mislabelled"),
        pytest.param("mlp", "subset", "mislabelled", marks=pytest.mark.thorough),
        pytest.param("mlp", "workers", "mislabelled", marks=pytest.mark.thorough),
    ],
)
def test_the_poisoned_sample_is_named(culprits, model, loader, poison):
    """A small part of what `benchmarks/culprits.py` measures."""
    named, wanted = culprits.named_sample(model, loader, poison, 7)
    assert named == wanted


def test_zero_edit_and_in_words(tmp_path, warm_python):
    """`tensortap run` alone finds the sample; check, explain and JSON say it."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "torch.manual_seed(0)\nx, y = torch.randn(96, 5), torch.arange(96) % 3\nx[41, 2] = float('nan')\n"
        "model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "for a, b in DataLoader(TensorDataset(x, y), 8, shuffle=True):\n"
        "    loss = torch.nn.functional.cross_entropy(model(a), b)\n"
        "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"
    )
    done = warm_python.run(["-m", "tensortap", "run", "--to", "run", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    run = tt.open_run(tmp_path / "run")
    finding = next(f for f in run.findings() if f.rule == "nonfinite")
    assert finding.evidence["samples"][0]["index"] == 41
    assert "index 41 of TensorDataset" in finding.message and "dataset[41]" in finding.advice
    assert "index 41 of TensorDataset" in story(run)


def poisoned(count=8, row=3, value=float("nan")):
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    x[row, 1] = value
    return x


def test_values_that_are_not_finite_come_first():
    """A NaN in the input outweighs another sample's size and another one's loss."""
    x = poisoned()
    x[5] *= 1e4
    logits, target = torch.zeros(8, 3), torch.zeros(8, dtype=torch.long)
    logits[6, 1] = 50.0
    call = LossCall(F.cross_entropy, (logits, target), {}, None)
    order = torch.argsort(sample_numbers(8, [x], call).suspicion(), descending=True).tolist()
    assert order[:3] == [3, 5, 6]


def test_nothing_is_blamed_where_all_are_alike():
    """Where all samples are bad in the same way, none is clear."""
    found = rank([torch.full((8, 4), float("nan"))], None, RecentBatches(), [])
    assert not found["clear"] and found["count"] == 8


def test_losses_of_tokens_belong_to_their_sample():
    """A loss over flattened positions is averaged for each sample."""
    logits, target = torch.randn(4 * 5, 7), torch.randint(0, 7, (20,))
    found = losses_of(LossCall(F.cross_entropy, (logits, target), {}, None), 4)
    assert torch.allclose(found, F.cross_entropy(logits, target, reduction="none").view(4, 5).mean(1))
    assert losses_of(LossCall(F.cross_entropy, (logits, target), {}, None), 3) is None
    assert losses_of(LossCall(lambda a: a.sum(), (logits,), {}, None), 4) is None


def test_a_spike_is_held_against_what_came_before():
    """Noise is none, a jump is one, and what is not finite is nothing to learn from."""
    history = LossHistory()
    assert [history.judge(v) for v in (1.0, 1.2, 0.8, 1.1, 0.9, 1.3)] == [""] * 6
    assert history.judge(9.0) == "spike" and history.judge(float("inf")) == "nonfinite"


class Files(TensorDataset):
    """A data set that lists its files."""

    def __init__(self, count):
        super().__init__(torch.arange(count))
        self.samples = [(f"file-{i}.png", 0) for i in range(count)]


def test_where_a_sample_comes_from():
    """Subsets and joined data sets are looked through, to the file of a sample."""
    for dataset, index, key in (
        (Files(6), 4, "file-4.png"),
        (Subset(Files(6), [5, 3]), 1, "file-3.png"),
        (ConcatDataset([Files(6), Subset(Files(6), [2])]), 6, "file-2.png"),
    ):
        found = describe_sample(GivenBatch(None, [index], dataset, 1, 1, 0), 0)
        assert (found["index"], found["key"]) == (index, key)
    assert "key" not in describe_sample(GivenBatch(None, [1], TensorDataset(torch.ones(3)), 1, 1, 0), 0)


def test_a_batch_that_was_read_ahead_is_told_from_the_next():
    """The batch is found by its memory, or by its values after a copy."""
    recent, batches = RecentBatches(), [torch.randn(4, 3) for _ in range(3)]
    for number, batch in enumerate(batches):
        recent.add(GivenBatch({"x": batch}, [number] * 4, None, 1, 1, number))
    assert recent.of([batches[1]]).number == 1
    assert recent.of([batches[0].double().reshape(12)]).number == 0
    assert recent.of([torch.zeros(4, 3)]) is None
    assert recent.before(recent.of([batches[1]])).number == 0


class Stream(IterableDataset):
    """Samples that have no index."""

    def __iter__(self):
        for i in range(64):
            yield torch.full((4,), float("nan") if i == 21 else 1.0), i % 3


def test_a_stream_and_a_batch_by_hand(tmp_path):
    """Without indices the row of the batch is named."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for name, batches in (("stream", DataLoader(Stream(), 8)), ("hand", [(poisoned(), torch.arange(8) % 3)])):
        with tt.watch(model, ":output", context=True, to=tmp_path / name) as tap:
            for x, y in batches:
                F.cross_entropy(model(x), y).backward()
                optimizer.zero_grad()
                tap.step()
        (event,) = [e for e in tap.run.events().to_pylist() if e["kind"] == "samples"]
        finding = next(f for f in tap.run.findings("nonfinite"))
        assert finding.evidence["samples"][0]["row"] == (5 if name == "stream" else 3), event


def test_weights_that_are_spoilt_point_to_the_batch_before(tmp_path):
    """A sample whose gradient spoils the weights is found in the step after."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randn(64)
    x[19] *= 1e30
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with tt.watch(model, ":output", context=True, to=tmp_path / "run") as tap:
        for step, (a, b) in enumerate(DataLoader(TensorDataset(x, y), 8)):
            loss = F.l1_loss(model(a), b)  # finite, but its gradient takes the weights out of range
            optimizer.param_groups[0]["lr"] = 1e14 if step == 2 else 1e-3
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.step(loss=loss.detach())
    found = next(f for f in tap.run.findings("nonfinite"))
    assert (found.steps.first, found.evidence["samples"][0]["index"]) == (3, 19)
    assert "the batch before" in found.message


def test_samples_run_alone():
    """Each sample's loss, first bad module and share of the gradient, though BatchNorm spreads what is bad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).train()
    x, y = poisoned(), torch.arange(8) % 3
    before = [p.clone() for p in (*model.parameters(), *model.buffers())]
    found = tt.rank_samples(model, x, target=y, loss=F.cross_entropy, gradients=True)
    assert (found[0].row, found[0].site, found[0].bad_inputs) == (3, "0:output", 1)
    assert all(sample.site == "" and sample.loss > 0 for sample in found[1:])
    assert sum(sample.gradient_share for sample in found[1:]) == pytest.approx(1.0)
    assert all(map(torch.equal, before, (*model.parameters(), *model.buffers()))) and model.training


def test_a_gradient_that_is_not_finite_comes_first():
    """A sample whose loss is finite and whose gradient is not is suspected before larger losses, and says so."""

    class Unit(nn.Module):
        def forward(self, x):
            return x / (x.square().sum(1, keepdim=True).sqrt() + 1e-6)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Unit(), nn.Linear(4, 1))
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    x[5], y[2] = 0.0, 30.0
    first, second, *_ = tt.rank_samples(model, x, target=y, loss=F.mse_loss, gradients=True)
    assert (first.row, second.row) == (5, 2)
    assert str(first).endswith("gradient not finite") and "% of the gradient" in str(second)


def test_minus_infinity_that_stays_is_no_mask():
    """A logarithm of zero is located; minus infinity that a softmax takes away, as that of a mask, is not."""

    class Log(nn.Module):
        def forward(self, x):
            return x.log()

    class Mask(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 0.9, -torch.inf)

    x = torch.linspace(0.1, 0.8, 32).reshape(8, 4)
    x[5, 1] = 0.0
    found = tt.rank_samples(nn.Sequential(nn.Identity(), Log()), x)
    assert [(sample.row, sample.site) for sample in found[:2]] == [(5, "1:output"), (0, "")]
    x[5, 1] = 1.0
    found = tt.rank_samples(nn.Sequential(Mask(), nn.Softmax(1), nn.Linear(4, 2)), x)
    assert {sample.site for sample in found} == {""}


def test_a_sample_out_of_size_at_a_usual_loss(tmp_path):
    """A sample a thousand times as large as the others is named, though its answer is right and nothing jumps."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    y = (x[:, 0] > 0).long()
    x[50] = 4000.0 * y[50] - 2000.0
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with tt.watch(model, ":output", context=True, to=tmp_path / "run") as tap:
        for a, b in DataLoader(TensorDataset(x, y), 8):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b)
            loss.backward()
            optimizer.step()
            tap.step(loss=loss.detach())
    assert not tap.run.findings(["loss_spike", "nonfinite"])
    (found,) = tap.run.findings("sample_out_of_size")
    assert (found.severity, found.steps.first, found.evidence["samples"][0]["index"]) == ("info", 6, 50)
    assert "stands out: its values are" in found.message


def test_per_sample_reducer(tmp_path):
    """`per_sample()` keeps three numbers for each sample, here and on a device."""
    x = poisoned().numpy()
    with tt.watch(tt.probe("x", keep=tt.per_sample()), to=tmp_path / "run") as watching:
        tt.tap(x, "x")
        watching.step()
    kept = watching.run.tensor("x", step=0, kind="per_sample")
    assert kept.shape == (3, 8) and kept[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    from tensortap.adapters.torch.device.keep import _samples

    assert _samples(0, torch.from_numpy(x)).numpy() == pytest.approx(kept)
    with pytest.raises(tt.TensortapError, match=r"per_sample\(axis=0\)"):
        tt.per_sample(axis=-1)
