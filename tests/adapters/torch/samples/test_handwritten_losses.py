"""Which sample did it, where the loss is written out by hand: from what autograd's graph remembers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tensortap as tt
from tensortap.adapters.torch.samples.batches import RecentBatches
from tensortap.adapters.torch.samples.handwritten_losses import handwritten_loss
from tensortap.adapters.torch.samples.suspects import rank

FORMS = {
    "power": lambda out, y: (out - y).pow(2).mean(),
    "product": lambda out, y: ((out - y) * (out - y)).sum(1).mean(),
    "absolute": lambda out, y: 0.5 * (out - y).abs().mean(),
    "root": lambda out, y: torch.sqrt(((out - y) ** 2).mean()),
    "weighted": lambda out, y: (torch.ones(8, 1) * (out - y) ** 2).sum() / 8,
    "with weight decay": lambda out, y: (out - y).square().mean() + 1e-3 * nn.Parameter(torch.ones(8, 3)).pow(2).sum(),
    "norm": lambda out, y: (out - y).norm(),
    "likelihood": lambda out, y: -(y * out.sigmoid().log()).mean(),
    "cross entropy": lambda out, y: -(out.log_softmax(1) * y).sum(1).mean(),
}
WITHOUT_LOSSES = ("norm", "likelihood", "cross entropy")


def ranked(form, row, value):
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(8, 4), torch.rand(8, 3)
    factor = torch.ones(8, 1)
    factor[row] = value
    loss = FORMS[form](model(x) * factor, y)
    return rank([x], None, RecentBatches(), [], loss)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_that_is_not_finite(form):
    """The sample whose row is NaN just before the loss is named, though its inputs are finite."""
    found = ranked(form, 5, torch.nan)
    assert found["clear"] and found["rows"][0]["row"] == 5 and found["rows"][0]["bad_outputs"]


@pytest.mark.parametrize("form", [form for form in FORMS if form not in WITHOUT_LOSSES])
def test_a_row_that_has_most_of_the_loss(form):
    """Of powers, products and absolute values the loss of each sample follows."""
    found = ranked(form, 2, 1e3)
    assert found["clear"] and found["rows"][0]["row"] == 2 and found["rows"][0]["share"] > 0.9


def test_a_logarithm_of_a_negative_number():
    """What the logarithm gives is looked at, not what it was given."""
    p = torch.rand(6, 2).add(0.1)
    p[4, 1] = -0.5
    loss = -(p.requires_grad_() * 1.0).log().mean()
    assert rank([torch.ones(6, 3)], None, RecentBatches(), [], loss)["rows"][0]["row"] == 4


def test_what_autograd_no_longer_has():
    """Nothing is concluded from a freed graph, an operand changed in place, or a loss that falls with its elements."""
    out = torch.ones(6, 2, requires_grad=True) * 1.0
    loss = out.abs().mean()
    loss.backward()
    assert handwritten_loss(loss, 6) is None
    out = torch.ones(6, 2, requires_grad=True) * 1.0
    loss = out.abs().mean()
    out.add_(1.0)
    assert handwritten_loss(loss, 6) is None
    falling = -(torch.ones(6, 2, requires_grad=True) * 1.0).abs().mean()
    assert handwritten_loss(falling, 6).output is None
    assert handwritten_loss(torch.ones((), requires_grad=True), 6) is None


def test_a_training_whose_loss_is_written_out(tmp_path):
    """The finding names the index in the data set."""

    class Root(nn.Module):
        def forward(self, x):
            return x.sqrt()

    x = torch.rand(32, 4) + 0.1
    x[21, 2] = -0.3
    model = nn.Sequential(Root(), nn.Linear(4, 1))
    with tt.watch(model, ":output", context=True, to=tmp_path / "run") as tap:
        for a, b in DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8):
            loss = (model(a) - b).pow(2).mean()
            loss.backward()
            tap.step(loss=loss.detach())
    (found,) = tap.run.findings("nonfinite")
    assert found.evidence["samples"][0]["index"] == 21 and "index 21 of TensorDataset" in found.message
