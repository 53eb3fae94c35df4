"""torch.compile: results are the same, nothing is recompiled for our sake, and what is not seen is said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import tensortap as tt
from tensortap.adapters.torch import modules, unseen

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The .grad attribute:UserWarning"
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.fc(x))


def net(n: int = 3) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(n)))


def test_a_compiled_model_is_the_same_and_its_inside_is_said(watch):
    """The wrapper's own output is seen; everything inside is listed as compiled."""
    model, x = net(), torch.randn(2, 4)
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    seen = watch(compiled, "**")
    assert torch.equal(compiled(x), expected)
    seen.tap.step()
    assert seen.places == [":output"]
    assert set(seen.unseen().values()) == {modules.COMPILED} and "_orig_mod.0.fc:output" in seen.unseen()


def test_a_function_around_a_watched_model(watch):
    """Where a whole step is compiled, no module runs by itself: that it may be so is said."""
    model, x = net(), torch.randn(2, 4)
    expected = model(x)
    seen = watch(model, "**:*")
    step = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
    assert torch.equal(step(x), expected)
    assert seen.unseen()["0.fc:output"] == unseen.MAYBE_COMPILED


def test_compiled_blocks_are_compiled_once(watch):
    """Twelve blocks compiled one by one share one graph, watched or not; what lies between them is seen."""
    model, x = net(12), torch.randn(2, 4, requires_grad=True)
    expected = model(x)
    for block in model:
        block.compile(backend="eager")
    seen = watch(model, "**:*")
    got = model(x)
    got.sum().backward()
    seen.tap.step()
    assert torch.equal(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the first input is a leaf, the others are not
    assert seen.unseen()["3.act:output"] == modules.COMPILED
    assert {r.place.site for r in seen.records if r.place.port == "output"} == {""}


def test_steps_of_a_compiled_root_are_found_by_the_optimizer(watch):
    """A root that runs compiled tells nothing: each optimizer step then ends a step, and gradients are recorded."""
    model = net(1)
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, "**:{grad,update}", ":output")
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen.tap.close()
    assert [r.step for r in seen.of("0.fc.weight:grad")] == [0, 1, 2]
    assert [r.step for r in seen.of("0.fc.weight:update")] == [0, 1, 2]
    assert seen.unseen() == {":output": modules.COMPILED}


def test_a_named_value_in_a_compiled_region(watch):
    """`tt.tap` neither breaks the graph nor changes it; that its value may have been passed by is said."""

    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return tt.tap(x * 2, "mine/x") + 1

    model, x = Named(), torch.randn(3)
    seen = watch(model, "mine/x")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x * 2 + 1)
    assert "torch.compile" in seen.unseen()["mine/x"]
