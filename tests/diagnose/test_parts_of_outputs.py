"""Losses that look at a part of the outputs: rules judge the softmax by what it was given, not by what was taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensortap as tt

Loss = Callable[[Tensor, Tensor], Tensor]
HEALTHY: dict[str, Loss] = {
    "gather of probabilities": lambda z, y: -torch.log(z.softmax(-1).gather(-1, y[:, None])).mean(),
    "gather of log-probabilities": lambda z, y: -z.log_softmax(-1).gather(1, y[:, None]).mean(),
    "gather of the logarithm": lambda z, y: -torch.log(z.softmax(-1)).gather(1, y[:, None]).mean(),
    "gather of logits": lambda z, y: (z.logsumexp(-1, keepdim=True) - z.gather(1, y[:, None])).mean(),
    "take_along_dim": lambda z, y: -torch.log(torch.take_along_dim(z.softmax(-1), y[:, None], -1)).mean(),
    "an index for each row": lambda z, y: -torch.log(z.softmax(-1)[torch.arange(len(y)), y][:, None]).mean(),
    "index_select": lambda z, y: -torch.log(z.softmax(-1).index_select(-1, torch.tensor([0]))).mean(),
    "the first by a slice": lambda z, y: -torch.log(z.softmax(-1)[..., :1]).mean(),
    "narrow": lambda z, y: -torch.log(z.softmax(-1).narrow(-1, 2, 1)).mean(),
    "split": lambda z, y: -torch.log(z.softmax(-1).split(1, -1)[0]).mean(),
    "a mask": lambda z, y: -torch.log((z.softmax(-1) * functional.one_hot(y, 5)).sum(-1, keepdim=True)).mean(),
    "a squared error of one class": lambda z, y: functional.mse_loss(z.softmax(-1)[:, :1], (y == 0).float()[:, None]),
    "cross entropy of one class": lambda z, y: functional.binary_cross_entropy(
        z.softmax(-1)[:, 1:2], (y == 1).float()[:, None]
    ),
    "nll_loss of some classes": lambda z, y: functional.nll_loss(z.log_softmax(1)[:, :4], y.clamp(max=3)),
    "probabilities at positions": lambda z, y: -torch.log(
        z.view(-1, 2, 5).softmax(-1).gather(-1, y.view(-1, 2, 1))
    ).mean(),
}  # fmt: skip
FAULTY: dict[str, Loss] = {
    "softmax over one": lambda z, y: -torch.log(z[:, :1].softmax(-1) + 1e-3).mean(),
    "softmax over one, squeezed": lambda z, y: functional.mse_loss(z[:, :1].softmax(-1)[:, 0], y.float()),
    "log_softmax over one channel": lambda z, y: functional.nll_loss(z[:, :1, None].log_softmax(1), y[:, None] * 0),
    "cross entropy over one class": lambda z, y: functional.cross_entropy(z[:, :1], y * 0),
}


def found_in(loss: Loss, to: Path) -> set[str]:
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 8)
    y = (x @ torch.randn(8, 5)).argmax(1)
    with tt.watch(model, to=to, context=True) as tap:
        for _ in range(12):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return {finding.rule for finding in tap.run.findings().at_least("error")}


@pytest.mark.parametrize("form", HEALTHY)
def test_a_part_of_the_probabilities_is_no_fault(form: str, tmp_path: Path) -> None:
    """What is taken of a softmax over several classes may have one column."""
    assert found_in(HEALTHY[form], tmp_path / "run") == set()


@pytest.mark.parametrize("form", FAULTY)
def test_a_softmax_over_one_output_is_named(form: str, tmp_path: Path) -> None:
    """A softmax that is given one output is named, whatever is made of it."""
    assert "constant_output" in found_in(FAULTY[form], tmp_path / "run")
