"""torch.export: unflattened programs show what the model shows, flat ones say what they cannot, none carries a tap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compiling import fresh, rows, tokens, train

import tensortap as tt
from tensortap.adapters.torch.modules import tree as modules
from tensortap.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.utils.counters.clear()  # other tests are not to think that anything is compiled


@pytest.fixture(scope="module")
def program() -> torch.export.ExportedProgram:
    return torch.export.export(fresh(), (tokens(),))


def test_an_unflattened_program(watch, program):
    """Its modules have the names of the model's, and show the same tensors and gradients."""
    model, memory, pattern = fresh(), tt.Memory(), "**:{output,grad_output}"
    with tt.watch(model, pattern, to=memory):
        train(model, model, 1)
    unflattened = torch.export.unflatten(program)
    seen = watch(unflattened, pattern)
    train(unflattened, unflattened, 1)
    seen.tap.close()
    got, want = rows(seen.memory.records), rows(memory.records)
    assert got.keys() == want.keys()
    assert all(got[key] == pytest.approx(want[key], rel=1e-4, abs=1e-5) for key in want)


def test_a_flat_program(watch, program):
    """What goes in and comes out is seen; for each module that is no more, the way to see it is named."""
    module = program.module()
    seen = watch(module, ":{input,output,grad_output}")
    train(module, module, 1)
    seen.tap.close()
    assert {str(r.place) for r in seen.memory.records} == {":input", ":output.logits", ":grad_output.logits"}
    refused = tt.sites(module).untappable
    assert refused["blocks.0.qkv"] == refused["head"] == modules.FLAT


def test_the_program_itself(program):
    """It is no module: the error says what to watch."""
    with pytest.raises(UnsupportedError, match=r"torch\.export\.unflatten"):
        tt.watch(program)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_watched_model_is_exported_without_taps(watch, strict):
    """An exported program leaves the process: no operation of ours may be in it."""
    model = fresh()
    watch(model, "**:{output,input,grad_output,grad_input}")
    exported = torch.export.export(model, (tokens(),), strict=strict)
    assert "tensortap" not in str(exported.graph)
    assert len(exported.graph_signature.user_inputs) == 1
