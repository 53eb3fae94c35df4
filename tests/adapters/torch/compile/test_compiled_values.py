"""What compiled models hold: named values, checkpoints, nested values, gradients that stay inside."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch
from compiling import COMPILING, EVERYTHING, Block, as_whole, by_regions, fresh, in_place, rows, tokens, train
from tests.adapters.torch.compile.test_compiled import close_to
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from tensortap.adapters.torch.autograd import gradients
from tensortap.adapters.torch.modules import unseen
from tensortap.record.counters import TensortapWarning

pytestmark = COMPILING


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return tt.tap(self.fc(x), "mine/x") + tt.tap({"a": x * 2}, "mine/y")["a"]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_named_values(watch, same, backend):
    """`tt.tap` in compiled code is seen, with its gradient and its slots; a tap that comes later is noticed."""
    model, x = Named(), torch.randn(2, 3)
    run = torch.compile(model, backend=backend, fullgraph=True)
    expected = run(x)
    seen = watch(model, "mine/x:{output,grad_output}", "mine/y")
    got = run(x)
    got.sum().backward()
    seen.tap.step()
    assert torch.equal(got, expected)
    assert same(seen.one("mine/x:output"), model.fc(x))
    assert seen.one("mine/x:grad_output")["mean"] == 1.0
    assert same(seen.one("mine/y:output.a"), x * 2)
    assert seen.unseen() == {}


def test_named_values_without_a_model():
    """`tt.watch()` alone sees what compiled code names."""
    run, memory = torch.compile(lambda x: tt.tap(x * 2, "twice") + 1, backend="aot_eager", fullgraph=True), tt.Memory()
    assert torch.equal(run(torch.ones(3)), torch.full((3,), 3.0))
    with tt.watch(to=memory) as tap:
        for _ in range(2):
            run(torch.ones(3))
            tap.step()
    assert [(r.step, str(r.place), r["mean"]) for r in memory.records] == [
        (0, "twice:output", 2.0),
        (1, "twice:output", 2.0),
    ]


class Checkpointed(nn.Module):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        if compiled:
            by_regions(self, "aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _gradients_under_checkpointing(watch, model: nn.Module, run) -> tuple[dict, list]:
    seen = watch(model, EVERYTHING)
    run(torch.ones(2, 5, 8, requires_grad=True)).sum().backward()
    seen.tap.close()
    records = seen.memory.records
    return rows([r for r in records if not r.recomputed]), [r for r in records if r.recomputed]


@pytest.mark.parametrize(
    "inside", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["compiled as a whole", "compiled blocks"]
)
def test_activation_checkpointing(watch, inside):
    """Everything once, gradients too; what runs again in backward is marked, or lies in a graph and is not seen."""
    torch.manual_seed(0)
    plain = Checkpointed(False)
    want, again = _gradients_under_checkpointing(watch, plain, plain)
    torch.manual_seed(0)
    model = Checkpointed(not inside)
    run = as_whole(model, "aot_eager") if inside else model
    got, recomputed = _gradients_under_checkpointing(watch, model, run)
    assert close_to(got, want)
    # Eager mode stops as soon as it has what it needs; a graph runs to its end.
    places = {str(r.place) for r in recomputed}
    assert not places if inside else places > {str(r.place) for r in again}


def test_a_module_that_runs_twice_before_backward(watch):
    """Two forwards, then two backwards: each gradient belongs to the call it comes from."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    seen = watch(model, "1:grad_output", "0:grad_input")
    seen.tap.step()
    first, second = run(x.requires_grad_()), run(x)
    (second.sum() * 2).backward()
    first.sum().backward()
    seen.tap.step()
    assert [r["mean"] for r in seen.of("1:grad_output")] == [1.0, 2.0]
    assert [r.call for r in seen.of("0:grad_input")] == [0, 1]


def test_steps_are_found(watch):
    """A compiled root's calls make steps, micro-batches of gradient accumulation excepted, inside a graph too."""
    for way in (as_whole, in_place):  # of a Sequential, whose hooks the compiler takes into the graph
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = watch(model, "0")
        run = way(model, "aot_eager")
        for _ in range(2):
            for _ in range(3):
                run(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            run(torch.ones(2, 3))
        seen.tap.close()
        records = seen.memory.records
        assert [(r.step, r.call) for r in records] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


@dataclass
class Out:
    hidden: Tensor
    more: tuple[Tensor, ...]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle, self.none = NestedInner(), nn.Linear(2, 2), NoTensor()

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x, scale=x * 2)
        self.none(3)
        return out.hidden + out.more[1]


class NestedInner(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Out:
        return Out(x + 1, (x, scale))


class NoTensor(nn.Module):
    def forward(self, n: int) -> int:
        return n + 1


def test_nested_values_and_reasons(watch, same):
    """Slots are those of eager mode, and so are the reasons for what is not seen."""
    model, x = Nested(), torch.randn(2, 2)
    seen = watch(model, "inner:{input,output}", "idle", "none:{input,output}")
    torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    seen.tap.step()
    assert same(seen.one("inner:input.scale"), x * 2)
    assert same(seen.one("inner:output.hidden"), x + 1)
    assert same(seen.one("inner:output.more[1]"), x * 2)
    assert seen.unseen() == {
        "idle:output": unseen.NEVER,
        "none:input": "was given no tensor",
        "none:output": "returned no tensor",
    }


def test_a_gradient_that_stays_inside(watch):
    """What a compiled model both returns and uses gets its gradient inside the graph: the root does not see it."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head(x)
            return logits.square().mean(), logits

    model = Loss()
    seen = watch(model, ":grad_output[1]", "head:grad_output")
    as_whole(model, "aot_eager")(torch.ones(1, 3))[0].backward()
    seen.tap.step()
    assert seen.places == ["head:grad_output"]
    assert seen.unseen() == {":grad_output": gradients.NO_BACKWARD + unseen.OR_INSIDE}


def test_a_step_that_is_not_finite(watch):
    """The place of the first NaN is named; which operation made it is not asked of a graph."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    found = []
    seen = watch(model, "**", on_nonfinite=found.append)
    as_whole(model, "aot_eager")(torch.full((1, 2), float("nan")))
    seen.tap.step()
    assert [origin.site for origin in found] == ["0"]


def test_an_error_of_ours_goes_no_further(watch, monkeypatch):
    """Inside a compiled step nothing of ours raises: it is counted and said once."""

    def broken(*args):
        raise RuntimeError("ours")

    model = nn.Sequential(nn.Linear(2, 2))
    seen = watch(model, "0")
    monkeypatch.setattr(seen.tap._adapter._observer.__class__, "take", broken)
    with pytest.warns(TensortapWarning, match="observing 0:output in compiled code"):
        for _ in range(2):
            as_whole(model, "aot_eager")(torch.ones(1, 2))
    assert seen.tap.counts == {"skipped_tensors": 2}


def test_nothing_is_kept_alive():
    """The operations know numbers only: a model goes when its owner lets go of it, watched, compiled or both."""
    model = fresh()
    run = as_whole(model, "aot_eager")
    tap = tt.watch(model, EVERYTHING, to=tt.Memory())
    train(run, model, 1)
    tap.close()
    gone = weakref.ref(model)
    adapter = weakref.ref(tap._adapter)
    del model, run, tap
    torch._dynamo.reset()  # the compiler itself holds on to what it compiled
    gc.collect()
    assert gone() is None and adapter() is None


@pytest.mark.thorough  # test_compiled.py compares the same rows
def test_diff_of_eager_and_compiled(tmp_path):
    """The runs of a model in eager mode and compiled are aligned by name and equal; a fault in one is found there."""
    for name, wrong in (("eager", False), ("compiled", False), ("wrong", True)):
        model = fresh()
        model.blocks[0].norm2.eps = 1e-2 if wrong else 1e-5
        run = model if name == "eager" else as_whole(model, "aot_eager")
        with tt.watch(run, "**:{output,grad_output}", to=tmp_path / name):
            train(run, model, 2)
    found = tt.diff(tmp_path / "eager", tmp_path / "compiled")
    assert found and not found.only_in_a and not found.only_in_b and len(list(found)) > 20
    assert tt.diff(tmp_path / "eager", tmp_path / "wrong").first.site == "blocks.0.norm2:output"


def test_capture(same):
    """A quick look into a compiled model."""
    model = fresh()
    found = tt.capture(as_whole(model, "aot_eager"), tokens(), "head", "embed")
    assert torch.equal(found["embed"], model.embed(tokens())) and found["head"].shape == (2, 5, 16)


SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
compiled = torch.compile(model, backend="eager", fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    compiled(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
"""


def test_a_script_that_compiles(tmp_path, warm_python):
    """`tensortap run` sees into the compiled model of a script that knows nothing of it."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = warm_python.run(["-m", "tensortap", "run", "--every", "2", "--to", "run", "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    found = tt.open(tmp_path / "run").table(columns=["site", "port", "step"]).to_pylist()
    assert [(row["site"], row["step"]) for row in found if row["site"] and row["port"] == "output"] == [
        (site, step) for step in (0, 2) for site in ("0", "1", "2")
    ]
