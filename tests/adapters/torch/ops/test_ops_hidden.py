"""Layers that run fused, and compiled parts, run as they did with operations tapped; what they hide is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt


def modes() -> int:
    return torch._C._len_torch_function_stack()


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8))


class Around(nn.Module):
    """Something between a fused layer and the root."""

    def __init__(self, layer: nn.Module, *more: Any) -> None:
        super().__init__()
        self.layer = layer
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(x * 1, *self.more)
        return (found[0] if isinstance(found, tuple) else found).relu()


PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
FUSED: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "layer": lambda: (Around(encoder().layers[0]), ()),
    "encoder": lambda: (Around(encoder()), ()),
    "padded": lambda: (Around(encoder(), None, PADDING), ()),
    "attention": lambda: (SelfAttention(), ()),
    "root layer": lambda: (encoder().layers[0], ()),
    "root encoder": lambda: (encoder(), ()),
}


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, x, x)[0].relu()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls of fused kernels."""
    calls: list[str] = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        real = getattr(torch, name)

        def counted(*args: Any, name: str = name, real: Any = real, **kwargs: Any) -> Any:
            calls.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(torch, name, counted)
    return calls


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", FUSED)
def test_fused_layers_stay_fused(watch, fused, name):
    """In inference they run the same kernels and give the same bits; what is inside is reported as unseen."""
    torch.manual_seed(1)
    model, more = FUSED[name]()
    model.eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        bare = model(x, *more)
        kernels = [*fused]
        fused.clear()
        seen = watch(model, "op:*", "op:softmax", strict=True)
        tapped = model(x, *more)
    assert torch.equal(bare, tapped) and fused == kernels and kernels
    seen.tap.step()
    assert "fused" in seen.unseen()["op:softmax"]
    assert ("relu" in {r["op"] for r in seen.records}) == (not name.startswith("root"))
    assert ("norm/layer_norm#0:output" in seen.places) == (name == "root encoder")
    assert modes() == 0


@pytest.mark.parametrize("name", ["layer", "attention", "root layer"])
def test_fused_layers_are_opened_when_asked(watch, fused, name):
    """With fast_path="leave" the operations inside are seen, the results are close, and that is said once."""
    torch.manual_seed(1)
    model, more = FUSED[name]()
    model.eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad(), pytest.warns(tt.TensortapWarning, match="does not run fused|do not run fused"):
        bare = model(x, *more)
        fused.clear()
        seen = watch(model, "op:{softmax,@attention}", fast_path="leave", strict=True)
        tapped = model(x, *more)
    assert torch.allclose(bare, tapped, atol=1e-5) and fused == []
    seen.tap.step()
    assert {"softmax", "scaled_dot_product_attention"} & {r["op"] for r in seen.records}


def test_training_after_inference_is_seen(watch):
    """A layer that ran fused is looked into as soon as it runs in the open."""
    model = Around(encoder().layers[0])
    seen = watch(model, "op:linear", strict=True)
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        model.eval()(x)
    seen.tap.step()
    assert seen.places == []
    model.train()(x)
    seen.tap.step()
    assert "layer.linear1/linear#0:output" in seen.places


def compiled_count(model: nn.Module, part: nn.Module, x: Tensor, *probes: Any) -> int:
    """How many graphs are compiled while a model with a compiled part runs six times, watched or not."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    part.compile(backend=backend)
    model(x)
    tap = tt.watch(model, *probes, to=tt.Memory(), strict=True) if probes else None
    for _ in range(6):
        model(x)
    if tap is not None:
        tap.close()
    torch.compiler.reset()
    return len(graphs)


def test_compiled_parts_are_not_compiled_again():
    """The mode is off where compiled code is called, so that nothing is compiled once more; that is reported."""
    x = torch.randn(2, 4)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Around(nn.Linear(4, 4)))

    bare, watched = model(), model()
    assert compiled_count(watched, watched[1], x, tt.probe("op:*", when=tt.every(2))) == compiled_count(
        bare, bare[1], x
    )


def test_a_compiled_root_hides_everything(watch):
    """Of a model that is compiled as a whole no operation is seen, and that is the reason given."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.compile(backend="eager")
    seen = watch(model, "op:linear", strict=True)
    model(torch.randn(2, 4))
    seen.tap.step()
    torch.compiler.reset()
    assert seen.places == [] and "compiled" in seen.unseen()["op:linear"]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_around_compiled_parts_the_rest_is_seen(watch):
    """Modules beside a compiled one are seen; what it hides has that for a reason."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].compile(backend="eager")
    seen = watch(model, "op:linear", "op:tanh", strict=True)
    model(torch.randn(2, 4))
    seen.tap.step()
    torch.compiler.reset()
    assert seen.places == ["0/linear#0:output"]
    assert "compiled" in seen.unseen()["op:tanh"]
