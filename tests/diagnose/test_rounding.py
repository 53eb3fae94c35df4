"""Gradients that are zero in exact arithmetic: what rounding leaves of them is not lost by fewer bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tensortap as tt


class Attention(nn.Module):
    """Attention with one fused projection, or with one for each of query, key and value."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = nn.Linear(24, 72) if fused else None
        self.parts = None if fused else nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.norm = nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.fused(x).chunk(3, -1) if self.fused else [part(x) for part in self.parts or ()]
        out: Tensor = self.norm(x + functional.scaled_dot_product_attention(q, k, v))
        return out


def attention(fused: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 24), nn.Unflatten(0, (8, 8)), Attention(fused), nn.Flatten(0, 1), nn.Linear(24, 4)
    )


def convolutions() -> nn.Module:
    shape = nn.Unflatten(1, (1, 2, 4))
    conv = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    return nn.Sequential(shape, *conv, nn.Linear(64, 4))


MODELS = {
    "a fused attention": lambda: attention(True),
    "an attention of three": lambda: attention(False),
    "batch normalisation": lambda: nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)),
    "of convolutions": convolutions,
}


def lost_gradients(model: nn.Module, to: Path, scale: float = 1.0) -> list[tt.Finding]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(64, 8)
    y = (x @ torch.randn(8, 4)).argmax(1)
    with tt.watch(model, tt.probe("**:grad", keep=[tt.stats(), tt.histogram()]), to=to) as tap:
        for _ in range(12):
            optimizer.zero_grad()
            (scale * functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
    return [finding for finding in tap.run.findings("low_precision") if finding.evidence.get("format") == "fp16"]


@pytest.mark.parametrize("name", MODELS)
def test_rounding_is_not_lost(name: str, tmp_path: Path) -> None:
    """The gradient of a bias that cancels out is rounding, and its elements may become zero."""
    torch.manual_seed(0)
    assert lost_gradients(MODELS[name](), tmp_path / "run") == []


@pytest.mark.parametrize("name", MODELS)
def test_small_gradients_are_lost(name: str, tmp_path: Path) -> None:
    """Gradients that are small as a whole are reported, those that cancel out not among them."""
    torch.manual_seed(0)
    (found,) = lost_gradients(MODELS[name](), tmp_path / "run", scale=1e-6)
    assert found.evidence["share"] > 0.05 and "lose more than 5% too" in found.message


def test_what_others_would_do_too_is_said_in_words(tmp_path: Path) -> None:
    """Of overflow, of which one element is enough, no percentage is told of the other sites."""
    (found,) = lost_gradients(MODELS["batch normalisation"](), tmp_path / "run", scale=1e7)
    assert found.message.endswith("would overflow too.") and "0% too" not in found.message


def test_a_bias_is_not_cast_to_fp8(tmp_path: Path) -> None:
    """Of fp8, which products multiply, nothing is said of a bias whose elements differ in size."""
    model = nn.Linear(8, 4)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([1.0, 1e-8, 1e-8, 1e-8]))
        model.weight.copy_(torch.randn(4, 8).sign())
    with tt.watch(model, tt.probe("**:param", keep=[tt.stats(), tt.histogram()]), to=tmp_path / "run") as tap:
        model(torch.ones(1, 8))
    assert {finding.evidence["format"] for finding in tap.run.findings("low_precision")} == {"fp16"}
