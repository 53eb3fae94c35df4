"""`tt.check_model`: what it finds, and that it leaves everything as it was."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensortap as tt
from tensortap.adapters.model_check import CHECKS
from tensortap.errors import ProbeError, UnsupportedError


def rules(found, severity="warning"):
    return [finding.rule for finding in found.at_least(severity)]


class Net(nn.Module):
    """A small classifier of sequences; subclasses break it."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.body = nn.Linear(16, 16)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 3)

    def pooled(self, hidden):
        return hidden.mean(1)

    def forward(self, ids):
        return self.head(self.pooled(self.drop(self.body(self.embed(ids)).relu())))


@pytest.fixture
def ids():
    torch.manual_seed(1)
    return torch.randint(1, 11, (8, 6))


CLASSES = torch.arange(8) % 3


def check(model, batch, **more):
    torch.manual_seed(0)
    return tt.check_model(model, batch, steps=12, **more)


def test_a_correct_model_raises_nothing(ids):
    """A classifier that is right gives no warning, and every check that has its data is made."""
    found = check(Net(0.1), ids, target=CLASSES, loss=F.cross_entropy)
    assert rules(found) == []
    assert set(found.skipped) == {"future_seen", "padding_seen"}


@pytest.mark.parametrize(
    ("mix", "line"),
    [
        (lambda h: h.mean(1) - h.mean((0, 1)), "pooled"),
        (lambda h: torch.softmax(h.mean(1), 0), "pooled"),
        (lambda h: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).mean(0), "pooled"),
        (lambda h: h.reshape(6, 8, 16).mean(0), "pooled"),
    ],
    ids=["centred", "softmax", "attention", "reshape"],
)
def test_samples_that_see_each_other(ids, mix, line):
    """Whatever mixes samples is an error, at the module that does it, with its line."""

    class Mixing(Net):
        def forward(self, ids):
            return self.head(mix(self.body(self.embed(ids)).relu()))

    found = check(Mixing(), ids, target=CLASSES, loss=F.cross_entropy)
    first = next(f for f in found if f.rule == "samples_mixed")
    assert (first.severity, first.site) == ("error", ":output")
    assert first.code.startswith("tests/adapters/torch/model_check/test_check_model.py:")


def test_batch_normalisation_mixes_by_design():
    """BatchNorm in training mode is worth knowing and no more; without running statistics too."""
    for norm in (nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)):
        found = check(nn.Sequential(nn.Linear(4, 4), norm), torch.randn(8, 4))
        assert rules(found) == [] and ("samples_mixed", "1:output") in [(f.rule, f.site) for f in found]


class Sequences(nn.Module):
    """An LSTM that believes that the first axis is time."""

    def __init__(self, batch_first=False):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def test_the_batch_on_the_wrong_axis():
    """An LSTM that is given samples where it expects time is an error where targets tell which axis is which."""
    x = torch.randn(8, 5, 4)
    found = check(Sequences(), x, target=CLASSES, loss=F.cross_entropy)
    assert "batch_first=True" in next(f for f in found if f.rule == "samples_mixed").advice
    assert rules(found) == ["samples_mixed"]
    assert rules(check(Sequences(True), x, target=CLASSES, loss=F.cross_entropy)) == []
    assert rules(check(nn.LSTM(4, 8), x)) == []  # who knows which axis is the batch?
    assert rules(check(nn.LSTM(4, 8), x, batch_axis=0)) == ["samples_mixed"]


class Language(nn.Module):
    """A language model of one layer of attention."""

    def __init__(self, causal):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.causal = causal
        self.head = nn.Linear(16, 11)

    def forward(self, ids):
        h = self.embed(ids)
        return self.head(h + F.scaled_dot_product_attention(h, h, h, is_causal=self.causal)).transpose(1, 2)


def test_a_language_model_that_sees_the_future():
    """Where targets are the next tokens, an output that depends on later ones is an error."""
    torch.manual_seed(0)
    text = torch.randint(0, 11, (4, 9))
    given = {"target": text[:, 1:], "loss": F.cross_entropy}
    assert rules(check(Language(False), text[:, :-1], **given)) == ["future_seen"]
    right = check(Language(True), text[:, :-1], **given)
    assert rules(right) == [] and "future_seen" in right.rules
    assert "future_seen" in check(Language(False), text).skipped  # nothing says that it predicts
    assert rules(check(Language(False), text, causal=True)) == ["future_seen"]


class Masked(nn.Module):
    """The mean of embeddings, with and without the mask."""

    def __init__(self, uses_mask):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.uses_mask = uses_mask

    def forward(self, input_ids, attention_mask):
        h, mask = self.embed(input_ids), attention_mask[..., None]
        return (h * mask).sum(1) / mask.sum(1) if self.uses_mask else h.mean(1)


def test_padding_that_changes_the_result(ids):
    """A pooling that forgets the mask is a warning; one that uses it is none."""
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert rules(check(Masked(False), batch)) == ["padding_seen"]
    right = check(Masked(True), batch)
    assert rules(right) == [] and "padding_seen" in right.rules


def test_parameters_without_a_gradient(ids):
    """A layer behind detach() and one that is never called are named, each with its own reason."""

    class Cut(Net):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(4, 4)

        def pooled(self, hidden):
            return hidden.detach().mean(1)

    found = [f for f in check(Cut(), ids, target=CLASSES, loss=F.cross_entropy) if f.rule == "no_gradient"]
    assert [(f.severity, f.site, len(f.places)) for f in found] == [
        ("warning", "embed.weight:grad", 2),
        ("warning", "spare.weight:grad", 1),
    ]
    assert "detach()" in found[0].advice and "never used" in found[1].message


def test_a_gradient_that_begins_with_zero_is_right():
    """A factor that starts at zero, as in LoRA, lets gradients through after a step."""

    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.up(self.down(x))

    assert rules(check(LoRA(), torch.randn(8, 4), target=CLASSES, loss=F.cross_entropy)) == []


@pytest.mark.parametrize(
    ("model", "target", "loss", "rule"),
    [
        (nn.Linear(4, 1), torch.randn(8), F.mse_loss, "targets_unpaired"),
        (nn.Linear(4, 1), torch.randn(8), lambda a, b: (a - b).square().mean(), "targets_unpaired"),
        (nn.Linear(4, 2), CLASSES, F.cross_entropy, "targets_unpaired"),
        (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), CLASSES, F.cross_entropy, "activation_loss_mismatch"),
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU()), CLASSES, lambda a, b: a.sum() * 0 + 1, "cannot_overfit"),
    ],
    ids=["broadcast", "broadcast by hand", "classes", "softmax twice", "no learning"],
)
def test_outputs_loss_and_targets_that_do_not_fit(model, target, loss, rule):
    """Each is named by the rule that knows it."""
    torch.manual_seed(0)
    assert rule in rules(check(model, torch.randn(8, 4), target=target, loss=loss))


def test_a_loss_that_begins_far_above_chance(ids):
    """Outputs that are too large at the start are a warning."""
    torch.manual_seed(0)
    model = Net()
    nn.init.normal_(model.head.weight, std=50.0)
    assert "initial_loss" in rules(check(model, ids, target=CLASSES, loss=F.cross_entropy))


def test_dropout_that_does_not_know_the_mode(ids):
    """A functional dropout that is on in evaluation mode is a warning, with its line."""

    class Noisy(Net):
        def pooled(self, hidden):
            return F.dropout(hidden, 0.5).mean(1)

    found = check(Noisy(), ids)
    assert rules(found) == ["mode_differs"]
    assert found[0].code.startswith("tests/adapters/torch/model_check/test_check_model.py:")


def test_bf16_that_loses_the_result():
    """A difference of large numbers is gone in bf16."""

    class Cancels(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return (self.fc(x) + 1000.0) - 1000.0

    assert "bf16_differs" in rules(check(Cancels(), torch.randn(8, 4)), "info")


def test_contrastive_outputs_depend_on_pairs():
    """Similarities of all pairs of samples are no mixing, and a loss over them is the model's own."""

    class Contrastive(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, x, y):
            logits = self.a(x) @ self.b(y).T
            return {"loss": F.cross_entropy(logits, torch.arange(len(x))), "logits": logits}

    assert rules(check(Contrastive(), (torch.randn(8, 4), torch.randn(8, 4)))) == []


def test_nodes_of_a_graph_are_no_samples():
    """Rows that an input relates to each other are left out, with the reason."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, edges):
            return self.fc(x).index_add(0, edges[1], self.fc(x)[edges[0]])

    found = check(Graph(), (torch.randn(8, 4), torch.randint(0, 8, (2, 20))))
    assert rules(found) == [] and "edges" in found.skipped["samples_mixed"]


def state(model):
    """Everything that a check might leave behind."""
    tensors = [*model.parameters(), *model.buffers()]
    return {
        "values": [t.detach().clone() for t in tensors],
        "objects": [id(t) for t in tensors],
        "gradients": [None if t.grad is None else (id(t.grad), t.grad.clone()) for t in model.parameters()],
        "requires_grad": [t.requires_grad for t in tensors],
        "modules": [
            {name: (list(v) if isinstance(v, dict) else v) for name, v in vars(m).items()} for m in model.modules()
        ],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1],
        "python": random.getstate(),
        "oneDNN": torch._C._get_mkldnn_enabled(),
        "modes": torch._C._len_torch_function_stack(),
    }


def same(a, b):
    if isinstance(a, (torch.Tensor, np.ndarray)):
        return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=np.asarray(a).dtype.kind == "f")
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b or a == b


class Stateful(nn.Module):
    """Buffers, a counter, state from call to call, randomness of three kinds, and an error on the n-th call."""

    def __init__(self, fails_at=10**9):
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.state, self.fails_at = 0, None, fails_at

    def forward(self, x):
        CALLS[0] += 1
        if CALLS[0] == self.fails_at:
            raise RuntimeError("half-way")
        self.calls += 1
        self.seen += 1
        self.state = (0.0 if self.state is None else 0.1 * self.state) + self.norm(self.fc(x)).detach()
        noise = random.random() + np.random.rand()
        return self.drop(self.norm(self.fc(x))) + self.state + (noise if self.training else 0.0)


CALLS = [0]


@pytest.mark.parametrize("fails_at", [10**9, 1, 2, 5, 8, 11, 14, 17, 20, 24])
def test_everything_is_left_as_it_was(fails_at):
    """Parameters, buffers, gradients, attributes, modes, hooks and random states are the same bits, whatever raises."""
    torch.manual_seed(0)
    model, x = Stateful(), torch.randn(8, 4)
    model(x).sum().backward()
    model.fails_at = fails_at
    model.drop.eval()
    model.fc.weight.requires_grad_(False)
    model.register_forward_hook(hook := lambda *_: None)
    batch = x.clone()
    before, CALLS[0] = state(model), 0
    try:
        found = tt.check_model(model, x, target=CLASSES, loss=lambda a, b: F.cross_entropy(a, b), steps=4)
        assert fails_at > 1 and (fails_at == 10**9 or any("half-way" in why for why in found.skipped.values()))
    except RuntimeError as error:
        assert str(error) == "half-way" and fails_at == 1
    assert same(before, state(model))
    assert torch.equal(batch, x) and list(model._forward_hooks.values()) == [hook]


def test_arguments_are_checked():
    """Unknown checks and a target without a loss name what to write."""
    with pytest.raises(ProbeError, match="samples_mixed"):
        tt.check_model(nn.Linear(2, 2), torch.ones(2, 2), checks=["sample_mixed"])
    with pytest.raises(ProbeError, match="loss="):
        tt.check_model(nn.Linear(2, 2), torch.ones(2, 2), target=torch.ones(2))
    found = tt.check_model(nn.Linear(2, 2), torch.ones(2, 2), checks=["no_gradient"])
    assert found.rules == ("no_gradient",)


def test_other_frameworks_refuse_by_name():
    """What is not PyTorch's names the framework, the feature and the alternative."""

    class Layer:
        def __call__(self, x):
            return x

    class Model:
        def __init__(self):
            self.fc = Layer()

        def __call__(self, x):
            return self.fc(x)

    with pytest.raises(UnsupportedError, match=r"NumPy.*check_model.*tensortap check"):
        tt.check_model(Model(), np.ones(2))


def test_the_page_lists_every_check():
    """docs/check-model.md has a row for each check."""
    import pathlib

    page = (pathlib.Path(__file__).parents[4] / "docs" / "check-model.md").read_text(encoding="utf-8")
    assert all(f"| `{name}`" in page for name in CHECKS)
