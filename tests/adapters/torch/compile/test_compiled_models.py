"""torch.compile on models nobody here wrote, and with Inductor, whose kernels are the ones that count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from compiling import EVERYTHING, Residual, graphs, rows, train
from torch import nn

import tensortap as tt

if TYPE_CHECKING:  # it takes every worker seconds to import, and few tests need it
    from transformers import PreTrainedModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def _fresh(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch._inductor.config  # not at the top: every worker imports this file, and few run it

    kept = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # No pool of processes for a few kernels, and no compiling only to see which instruction sets there are.
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": False}):
        yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def llama() -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=16, **sizes))


def gpt2() -> PreTrainedModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, **sizes))


def bert() -> PreTrainedModel:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return BertForMaskedLM(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))


Result = tuple[dict[tuple[str, int, int], tuple[float, ...]], torch.Tensor, dict[str, torch.Tensor]]


def _trained(model: PreTrainedModel, run: Callable[..., Any], tapped: bool) -> Result:
    """One step: what was recorded, the logits, the gradients."""
    memory, ids = tt.Memory(), torch.arange(12).view(2, 6)
    model.zero_grad()
    tap = tt.watch(model, EVERYTHING, to=memory) if tapped else None
    out = run(input_ids=ids, labels=ids)
    out.loss.backward()
    if tap is not None:
        tap.close()
    return rows(memory.records), out.logits, {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, marks=pytest.mark.thorough, id=make.__name__) for make in (llama, gpt2, bert)],
)
def test_transformers(make, monkeypatch):
    """Every tensor that eager mode shows is shown, with its values; bits and graphs are those without taps."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    model = make().eval()  # dropout draws other numbers in a compiled graph
    model.loss_type = "ForMaskedLM" if make is bert else "ForCausalLM"
    want, _, _ = _trained(model, model, tapped=True)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    _, logits, gradients = _trained(model, run, tapped=False)
    alone = graphs()
    got, tapped_logits, tapped_gradients = _trained(model, run, tapped=True)
    assert graphs() - alone == alone == 1
    assert torch.equal(logits, tapped_logits)
    assert all(torch.equal(gradients[name], tapped_gradients[name]) for name in gradients)
    # The loss is computed inside: the gradient of the logits that the model returns as well does not leave the graph.
    # Tensors inside a cache object are looked for in eager mode only, as docs/limits.md says.
    lost = {key for key in want.keys() - got.keys() if "past_key_values" not in key[0]}
    assert lost == {(":grad_output.logits", 0, 0)}
    # transformers makes a mask where it compiles, and dropout that does nothing is an operation there.
    assert all("attention_mask" in place or "drop" in place for place, _, _ in got.keys() - want.keys())
    assert all(got[key] == pytest.approx(want[key], rel=1e-3, abs=1e-5) for key in want.keys() & got.keys())


def residual() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Residual(), torch.randn(3, 8)


def test_inductor(watch):
    """fp32 results are those without taps to rounding, every tensor is seen, and steps that nobody wants are not."""
    (model, x), memory = residual(), tt.Memory()
    with tt.watch(model, EVERYTHING, to=memory):
        train(model, model, 1, x)
    want = rows(memory.records)
    run = torch.compile(model, fullgraph=True)
    bare = train(run, model, 1, x)
    seen = watch(model, tt.probe(EVERYTHING, when=tt.at([0, 2])))
    with torch._dynamo.config.patch(error_on_recompile=True):
        tapped = train(run, model, 3, x)
    seen.tap.close()
    torch.testing.assert_close(tapped, bare, rtol=1e-5, atol=1e-6)  # Inductor compiled two programs
    got = rows(seen.memory.records)
    assert {step for _, _, step in got} == {0, 2}
    assert {key for key in got if key[2] == 0} == want.keys()
    assert all(got[key] == pytest.approx(want[key], rel=1e-3, abs=1e-4) for key in want)


def test_verify_on_a_compiled_model():
    """The proof works on what torch.compile made, and nothing is left behind; aot_eager reorders nothing."""
    model, x = residual()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = tt.verify(run, lambda: train(run, model, 1, x)[0], EVERYTHING, repeats=1)
    assert found and found.same_outputs and found.same_gradients and not found.left_behind
    assert found.records > 15


class Rounds(nn.Module):
    """Fused, the product is not rounded before it is normalised; where it must be looked at, it is."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.norm = nn.Sigmoid(), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(x) * x)


def test_verify_says_when_rounding_differs():
    """bf16 is rounded where a tapped tensor must exist; verify says whether the outputs are the same bits."""
    model, x = Rounds().bfloat16().requires_grad_(False), torch.randn(64, 64).bfloat16()
    run = torch.compile(model)
    bare = run(x)
    with tt.watch(model, "**", to=tt.Memory()):
        same = torch.equal(bare, run(x))
    found = tt.verify(run, x, "**", repeats=1)
    assert found.deterministic and bool(found) is found.same_outputs is same
    assert same or any("output" in difference for difference in found.differences)


def test_the_caches_of_the_compiler_are_used(tmp_path: Path, watch):
    """A tapped graph is found again in the cache, and runs with the taps of the day."""
    for expected in ("miss", "hit"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
        seen = watch(model, "**:{output,grad_output}")
        torch.compile(model)(torch.ones(2, 3)).sum().backward()
        seen.tap.step()
        assert len(seen.records) == 6
        counts = torch._dynamo.utils.counters
        found = counts["aot_autograd"][f"autograd_cache_{expected}"] + counts["inductor"][f"fxgraph_cache_{expected}"]
        assert found >= 1, dict(counts)
