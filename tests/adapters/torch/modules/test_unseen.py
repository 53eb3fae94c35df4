"""What was wanted and not seen is listed, with the reason."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt
from tensortap.adapters.torch.modules import tree as modules
from tensortap.adapters.torch.modules import unseen


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)
        self.mha = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_module_that_never_ran(watch):
    """A module that is there but not called is named."""
    model = Partly()
    seen = watch(model, "used", "idle")
    model(torch.randn(2, 3))
    assert seen.unseen() == {"idle:output": unseen.NEVER}


def test_reasons_for_missing_gradients(watch):
    """No backward, inputs that need none, gradients switched off: each is said."""
    model = Partly()
    seen = watch(model, "used:{grad_output,grad_input}")
    with torch.no_grad():
        model(torch.randn(2, 3))
    assert "switched off" in seen.unseen()["used:grad_output"]
    model(torch.randn(2, 3))
    assert seen.unseen()["used:grad_output"] == "ran, but no backward came back to it"
    assert seen.unseen()["used:grad_input"] == "its input needs no gradient"
    model(torch.randn(2, 3)).sum().backward()
    assert list(seen.unseen()) == ["used:grad_input"]


def test_a_module_that_hands_its_input_on(watch):
    """Dropout in eval returns its input itself: its input gradient cannot be told from the output's, which is said."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval()
    seen = watch(model, "1:grad_input")
    model(torch.randn(1, 2)).sum().backward()
    assert "returns its input unchanged" in seen.unseen()["1:grad_input"]


def test_attention_uses_its_projection_by_weight(watch):
    """nn.MultiheadAttention never calls out_proj, which is said."""
    model = nn.ModuleDict({"mha": nn.MultiheadAttention(4, 2, batch_first=True)})
    seen = watch(model, "mha.**")
    x = torch.randn(1, 3, 4)
    model["mha"](x, x, x)
    seen.tap.step()
    assert seen.unseen() == {"mha.out_proj:output": modules.BY_WEIGHT}
    assert seen.places == ["mha:output[0]", "mha:output[1]"]


def test_unseen_sites_are_counted_and_written(tmp_path: Path):
    """`tap.counts`, `_rank.json` and `run.info` have them."""
    model = Partly()
    with tt.watch(model, "idle", "used", to=tmp_path / "run") as tap:
        model(torch.randn(2, 3))
    assert tap.counts["unseen"] == 1
    written = json.loads((tmp_path / "run/rank=0/_rank.json").read_text())
    assert written["unseen"] == tap.run.info["unseen"] == {"idle:output": unseen.NEVER}


@pytest.fixture
def _jit():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.mark.usefixtures("_jit")
def test_scripted_parts_are_passed_over_and_said(watch):
    """A scripted submodule takes no hooks: the rest is seen, it and what lies in it are listed."""
    inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    model = nn.Sequential(nn.Linear(3, 3), inner)
    seen = watch(model, "**")
    model(torch.randn(2, 3))
    seen.tap.step()
    assert seen.places == ["0:output", ":output"]
    assert seen.unseen() == {f"{path}:output": modules.SCRIPTED for path in ("1", "1.0", "1.1")}


@pytest.mark.usefixtures("_jit")
def test_a_scripted_root_is_refused():
    """Watching a scripted module raises, and says what to watch instead."""
    with pytest.raises(tt.TensortapError, match="scripted from"):
        tt.watch(torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.usefixtures("_jit")
def test_a_traced_root_shows_its_outside(watch):
    """A traced module's own input and output are seen, its parts are listed."""
    model = torch.jit.trace(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3))
    seen = watch(model, "**:{input,output}")
    model(torch.randn(2, 3))
    seen.tap.step()
    assert seen.places == [":input", ":output"]
    assert {path.partition(":")[0] for path in seen.unseen()} == {"0", "1"}


def graph_of(traced) -> str:
    return re.sub(r"___torch_mangle_\d+\.", "", str(traced.inlined_graph))


@pytest.mark.usefixtures("_jit")
def test_tracing_a_watched_model_gives_the_same_graph(watch):
    """torch.jit.trace of a watched model warns of nothing and contains nothing of ours."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    expected = graph_of(torch.jit.trace(model, x))
    watch(model, "**:*")
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, x)
    assert graph_of(traced) == expected


def encoder(**options) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options)


class FastPath:
    """Counts calls of the fused kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        real = torch._transformer_encoder_layer_fwd

        def fused(*args):
            self.calls += 1
            return real(*args)

        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fused)


def test_the_fused_path_is_kept_and_said(watch, monkeypatch):
    """In inference nn.TransformerEncoder runs fused while watched, bit for bit; what lies inside is listed."""
    model, x, fast = encoder().eval(), torch.randn(2, 5, 8), FastPath(monkeypatch)
    with torch.no_grad():
        expected = model(x)
        assert fast.calls == 2
        seen = watch(model, "**:{output,input}")
        got = model(x)
    seen.tap.step()
    assert fast.calls == 4 and torch.equal(got, expected)
    assert seen.places == [":input", ":output"]
    assert set(seen.unseen().values()) == {unseen.FUSED}


def test_training_shows_what_the_fused_path_hides(watch, monkeypatch):
    """Hooks go on for training and off for inference, in whatever order."""
    model, x, fast = encoder().eval(), torch.randn(2, 5, 8), FastPath(monkeypatch)
    seen = watch(model, "layers.0.linear1")
    with torch.no_grad():
        model(x)
        model.train()(x)
        model.eval()(x)
        model.layers[0](x)
    model(x)
    seen.tap.close()
    assert [r.step for r in seen.records] == [1, 3]
    assert fast.calls == 5


def test_a_layer_called_by_itself_runs_fused_too(watch, monkeypatch):
    """After training has put the hooks on, a direct call of one layer in inference takes them off in time."""
    model, x, fast = encoder(), torch.randn(2, 5, 8), FastPath(monkeypatch)
    seen = watch(model, "**")
    model(x)
    model.eval()
    with torch.no_grad():
        model.layers[1](x)
    assert fast.calls == 1
    seen.tap.step()


def test_a_watched_layer_itself_runs_fused(watch, monkeypatch):
    """Watching just one encoder layer leaves it fused too, and finds its steps."""
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    fast = FastPath(monkeypatch)
    seen = watch(layer, "**")
    with torch.no_grad():
        layer(x)
    layer(x)
    seen.tap.close()
    assert fast.calls == 1 and seen.steps == [1]
    assert not torch.nn.modules.module._global_forward_hooks


def test_leaving_the_fused_path_is_visible_and_said(watch, monkeypatch):
    """`fast_path="leave"` shows the inside, warns once, and the results agree to rounding."""
    model, x, fast = encoder().eval(), torch.randn(2, 5, 8), FastPath(monkeypatch)
    with torch.no_grad():
        expected = model(x)
        fast.calls = 0
        with pytest.warns(tt.TensortapWarning, match="rounding"):
            seen = watch(model, "layers.*.linear2", fast_path="leave")
            got = model(x)
    seen.tap.step()
    assert fast.calls == 0 and torch.allclose(got, expected, atol=1e-5)
    assert seen.places == ["layers.0.linear2:output", "layers.1.linear2:output"]


def test_a_layer_that_cannot_fuse_is_seen_in_inference(watch):
    """Where the fused path does not apply (sequence first, as by default), nothing is hidden."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False).eval()
    seen = watch(model, "layers.0.linear1")
    with torch.no_grad():
        model(torch.randn(5, 2, 8))
    seen.tap.step()
    assert seen.places == ["layers.0.linear1:output"]


def test_an_unknown_fast_path_is_refused():
    """A misspelt option raises at set-up."""
    with pytest.raises(tt.TensortapError, match="fast_path"):
        tt.watch(nn.Linear(2, 2), fast_path="Keep")
