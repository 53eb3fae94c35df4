"""Where parts that know nothing of each other meet: operations with compiled code, muting with steps that find
themselves, ranks with functions, devices with shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compiling import COMPILING, Residual, by_regions, fresh, graphs, in_place, train
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import tensortap as tt
from tensortap.adapters.torch.ops.visibility import COMPILED

pytestmark = COMPILING


def wrapped(model: nn.Module, backend: str) -> Callable[..., Any]:
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize(
    ("way", "compile_first"),
    [
        (wrapped, True),
        (in_place, False),
        pytest.param(wrapped, False, marks=pytest.mark.thorough),
        pytest.param(in_place, True, marks=pytest.mark.thorough),
    ],
)
def test_operations_of_a_compiled_model_are_hidden_and_its_modules_are_not(
    watch: Any, way: Callable[..., Any], compile_first: bool
) -> None:
    """Compiled before or after it is watched: one graph, no operation of the graph's own is taken for the model's."""
    model = Residual()
    run: Any = way(model, "aot_eager") if compile_first else model
    seen = watch(run, "op:*", "**")
    run = run if compile_first else way(model, "aot_eager")
    train(run, model, batch=torch.ones(2, 8))
    seen.tap.step()
    assert graphs() == 1
    assert not [place for place in seen.places if "/" in place] and "up:output" in seen.places
    assert seen.unseen() == {"op:*": COMPILED}


@pytest.mark.thorough  # test_blocks_share_a_graph has it without operations
def test_one_graph_for_all_blocks_with_operations_watched_too(watch: Any) -> None:
    """Blocks that are compiled after they are watched share a graph, as they do where nobody wants operations."""
    model = fresh(layers=10)  # more than the compiler compiles one function for
    seen = watch(model, "op:*", "**")
    by_regions(model, "aot_eager")
    train(model, model)
    seen.tap.step()
    assert graphs() == 1
    assert "blocks.9.up:output" in seen.places and "head/linear#0:output" in seen.places
    assert not [place for place in seen.places if place.startswith("blocks") and "/" in place]


def test_blocks_compiled_between_two_steps_are_compiled_once(watch: Any) -> None:
    """Operations seen in one step, hidden from the next: nothing is compiled with our mode on."""
    model = fresh(layers=2)
    seen = watch(model, "op:linear")
    train(model, model, steps=1)
    seen.tap.step()
    assert "blocks.0.up/linear#0:output" in seen.places
    by_regions(model, "aot_eager")
    train(model, model, steps=1)
    made = graphs()
    seen.tap.step()
    train(model, model, steps=1)
    seen.tap.step()
    assert graphs() == made
    assert {str(r.place) for r in seen.records if r.step} == {"head/linear#0:output"}


def test_operations_of_a_compiled_model_verify() -> None:
    """`verify` finds nothing changed and nothing left over."""
    compiled = torch.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend="aot_eager")
    proof = tt.verify(compiled, torch.ones(2, 2), "op:*", "**", repeats=1)
    assert proof


def test_what_is_called_while_muted_belongs_to_no_step(watch: Any) -> None:
    """Where steps find themselves, an evaluation between two of them is neither recorded nor counted."""
    model = nn.Linear(2, 2)
    seen = watch(model, ":output")
    for scale in (1.0, 2.0):
        model(torch.full((1, 2), scale)).sum()
        seen.tap.mute()
        for _ in range(3):
            model(torch.zeros(1, 2))
        seen.tap.unmute()
    seen.tap.close()
    assert [(r.step, r.call) for r in seen.records] == [(0, 0), (1, 0)]


def test_a_step_closed_while_muted_opens_a_muted_one(watch: Any) -> None:
    """`tap.step()` and spans of threads do not end the silence."""
    model = nn.Linear(2, 2)
    seen = watch(model, ":output")
    seen.tap.mute()
    for _ in range(2):
        model(torch.zeros(1, 2))
        seen.tap.step()
    with seen.tap.span():
        model(torch.zeros(1, 2))
    seen.tap.unmute()
    model(torch.zeros(1, 2))
    seen.tap.step()
    assert [(r.step, r.call) for r in seen.records] == [(2, 0)]


def test_a_block_of_operations_counts_on_after_silence_and_spans() -> None:
    """Operations are numbered within their step, whatever comes between them."""
    memory, one = tt.Memory(), torch.ones(2, 2)
    with tt.ops("matmul", to=memory) as tap:
        one @ one
        tap.mute()
        one @ one
        tap.unmute()
        one @ one
        with tap.span():
            one @ one
        one @ one
    found = [(r.step, str(r.place), r.call) for r in sorted(memory.records, key=lambda r: (r.step, r.seq))]
    assert found == [(0, f"/matmul#{i}:output", 0) for i in range(3)] + [(1, "/matmul#0:output", 0)]


def test_a_watched_function_can_be_called_on_ranks_that_do_not_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tap.call` gives what the function gives, and `ops` blocks run, on a rank that only stands by."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    memory, one = tt.Memory(), torch.ones(2, 2)
    with tt.watch(torch.matmul, "op:matmul", to=memory, ranks=0) as tap:
        assert torch.equal(tap.call(one, one), one @ one)
    with tt.ops("matmul", to=memory, ranks=0) as tap, tap.span():
        tap.mute()
        one @ one
        tap.step()
    assert not memory.records


@pytest.mark.parametrize("path", ["", "torch"])
def test_the_way_of_a_device_does_not_show_as_operations(
    watch: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """What reduces a module's output on a device is none of the model's operations."""
    monkeypatch.setenv("TENSORTAP_DEVICE_PATH", path)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    seen = watch(model, "op:*", "**:output", "**:input")
    model(torch.ones(1, 2)).sum().backward()
    seen.tap.step()
    assert {p for p in seen.places if "/" in p} == {"0/linear#0:output", "1/relu#0:output"}
    with tt.ops(to=(memory := tt.Memory())):
        tt.tap(torch.ones(2).exp(), "a/b")
    assert [str(r.place) for r in memory.records] == ["/ones#0:output", "/exp#0:output"]


@pytest.fixture
def _one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_what_shards_a_model_does_not_show_as_operations(watch: Any) -> None:
    """Under `fully_shard` the operations are those of the same model without it, under the same numbers."""
    places = []
    for shard in (False, True):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Flatten(), nn.Linear(2, 2))
        if shard:
            mesh = init_device_mesh("cpu", (1,))
            fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
        seen = watch(model, "op:*", "op:*:grad_output", "**:grad_input")
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            seen.tap.step()
        assert not seen.tap.counts
        places.append({(r.step, str(r.place)) for r in seen.records if "/" in str(r.place)})
        seen.tap.close()
    assert places[0] == places[1] and (1, "1/flatten#0:output") in places[0]


class Doubling(nn.Module):
    """Does one operation by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul(2)


@pytest.mark.usefixtures("_one_rank")
def test_operations_of_a_stage_that_rests_between(watch: Any) -> None:
    """The operations of a pipeline stage's own forward are seen in every step that is wanted."""
    stage = PipelineStage(Doubling(), 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 1)
    seen = watch(stage, tt.probe("op:mul", when=tt.every(2)))
    for _ in range(5):
        schedule.step(torch.ones(2))
    seen.tap.close()
    assert [(r.step, str(r.place)) for r in seen.records] == [(s, "stage0/mul#0:output") for s in (0, 2, 4)]
