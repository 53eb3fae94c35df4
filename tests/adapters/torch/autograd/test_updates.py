"""What an optimizer changed, of parameters so large that PyTorch copies and subtracts them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.autograd import updates

LARGE = 600  # a square of it has more elements than the kernel copies itself


def train(model: nn.Module, *probes: Any, steps: int = 3) -> tuple[list[tt.Record], list[dict[str, torch.Tensor]]]:
    """Train a model; return the records, and what its parameters were before each step and after the last."""
    memory, optimizer = tt.Memory(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    with tt.watch(model, *probes, to=memory, strict=True) as watching:
        for _ in range(steps):
            seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
            optimizer.zero_grad()
            model(torch.randn(4, LARGE)).pow(2).mean().backward()
            optimizer.step()
            watching.step()
    seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    return memory.records, seen


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(LARGE, LARGE), nn.ReLU(), nn.Linear(LARGE, 3))


@pytest.mark.parametrize("spare_bytes", [updates._SPARE_BYTES, 0], ids=["memory is kept", "memory is not kept"])
def test_every_step_has_its_own_difference(monkeypatch: pytest.MonkeyPatch, spare_bytes: int) -> None:
    """Updates of large and small parameters are what changed in that step, to the bit, and so is their ratio."""
    monkeypatch.setattr(updates, "_SPARE_BYTES", spare_bytes)
    records, seen = train(network(), tt.probe("**:update", keep=tt.stats()))
    assert len(records) == 3 * 4
    for record in records:
        name = record.place.site
        before, after = seen[record.step][name], seen[record.step + 1][name]
        expected = tt.summarize((after - before).numpy())
        assert record["l2"] == expected.l2 and record["mean"] == expected.mean and record["max"] == expected.max
        assert record.numbers["ratio"] == expected.l2 / tt.summarize(before.numpy()).l2


def test_a_function_may_keep_what_it_is_given() -> None:
    """An update that the user's function keeps stays as it was when later steps are recorded."""
    kept: list[torch.Tensor] = []

    def keep(update: torch.Tensor) -> float:
        kept.append(update)
        return 0.0

    model = network()
    _, seen = train(model, tt.probe("0.weight:update", keep=keep))
    assert len(kept) == 3
    for step, update in enumerate(kept):
        assert np.array_equal(update.numpy(), (seen[step + 1]["0.weight"] - seen[step]["0.weight"]).numpy())


def test_a_parameter_that_is_replaced_has_its_own_copy() -> None:
    """Between steps a parameter may get another shape or order; its update is that of what it is then."""
    model = network()
    first = model[0]
    assert isinstance(first, nn.Linear)
    memory = tt.Memory()
    with tt.watch(model, tt.probe("0.weight:update", keep=tt.stats()), to=memory, strict=True) as watching:
        for step in range(3):
            if step == 1:
                first.weight.data = first.weight.data.t().contiguous().t()
            if step == 2:
                first.weight.data = first.weight.data.double()
            optimizer = torch.optim.SGD([first.weight], lr=1.0)
            before = first.weight.detach().clone()
            first.weight.grad = torch.full_like(first.weight, 0.5)
            optimizer.step()
            watching.step()
            watching.flush()
            change = tt.summarize((first.weight.detach() - before).numpy())
            assert memory.records[-1]["l2"] == change.l2 and memory.records[-1]["mean"] == change.mean
