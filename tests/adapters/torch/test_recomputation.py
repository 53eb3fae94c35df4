"""Checkpointed modules, which run a second time in the backward pass: marked, and in the step that they are of."""

from __future__ import annotations

import pytest
import torch
from small_net import calls, net, x
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(3, 3), net(), nn.Linear(2, 2)
        self.reentrant = reentrant

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        value = checkpoint(self.inside, value, use_reentrant=self.reentrant)
        return self.last(value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_marked_and_not_doubled(watch, same, reentrant):
    """Checkpointed modules run twice: the second time is marked, and gradients are recorded once."""
    model, batch = Checkpointed(reentrant), x()
    plain = Checkpointed(reentrant)
    plain.load_state_dict(model.state_dict())
    seen = watch(model, "**:{output,grad_output,grad_input}", "**:grad")
    model(batch).square().sum().backward()
    seen.tap.close()
    assert [r.recomputed for r in seen.of("inside.0:output")] == [False, True]
    assert [r.call for r in seen.of("inside.0:output")] == [0, 0]
    assert len({r["mean"] for r in seen.of("inside.0:output")}) == 1
    assert [r.recomputed for r in seen.of("first:output")] == [False]
    for place in ("inside.0:grad_output", "inside.2:grad_output", "inside.2:grad_input", "inside.0.weight:grad"):
        seen.one(place)
    plain(batch).square().sum().backward()
    assert same(seen.one("inside.0.weight:grad"), plain.inside[0].weight.grad)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_root_stays_in_its_step(watch, reentrant):
    """Checkpointing the whole model makes neither a second step nor a second gradient."""
    model = net()
    seen = watch(model, "0", "0:grad_output")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        checkpoint(model, x().requires_grad_(), use_reentrant=reentrant).sum().backward()
        optimizer.step()
    seen.tap.close()
    assert [(r.step, r.recomputed) for r in seen.of("0:output")] == [(0, False), (0, True), (1, False), (1, True)]
    assert calls(seen, "0:grad_output") == {0: 1, 1: 1}
