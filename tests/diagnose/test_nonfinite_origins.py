"""What `on_nonfinite` learnt while a model trained is told by the finding about NaN and Inf."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensortap as tt


@pytest.mark.filterwarnings("ignore::tensortap.TensortapWarning")
def test_the_operation_that_on_nonfinite_named_is_in_the_finding(tmp_path):
    """What was known while it trained is told by `check` too: the operation, its module and the reason."""

    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x)

    model = nn.Sequential(nn.Identity(), Root())
    with torch.no_grad(), tt.watch(model, to=tmp_path / "run", on_nonfinite="record") as tap:
        for value in (1.0, -1.0):
            model(torch.full((2, 3), value))
            tap.step()
    (found,) = tap.run.findings("nonfinite")
    assert found.steps.first == 1 and "Its origin: sqrt in 1 (Root)" in found.message
    assert any("negative" in line for line in found.evidence["origin"])


def test_an_origin_in_the_batch_is_said_to_come_in(tmp_path):
    """`on_nonfinite` blames no layer for a bad batch, and the advice does not offer what is on already."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(3, 8, 4)
    batches[1, 3, 2] = torch.inf
    with pytest.warns(tt.TensortapWarning, match="the batch was not finite when it came in"), tt.watch(
        model, to=tmp_path / "run", on_nonfinite="record"
    ) as tap:  # fmt: skip
        for batch in batches:
            model(batch)
            tap.step()
    [found] = [each for each in tap.run.findings() if each.rule == "nonfinite"]
    assert found.steps.first == 1 and "Its origin: the batch was not finite when it came in." in found.message
    assert "how the data is read" in found.advice and "on_nonfinite" not in found.advice
