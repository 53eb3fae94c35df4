"""What is watched of a PyTorch model when no probe is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import tensortap as tt


class Scale(nn.Module):
    """Computes with parameters in a list; there is no other module in it."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(3))])

    def forward(self, x):
        return x * self.scales[0]


class Token(nn.Module):
    """Adds a parameter of its own to what a module in it computed."""

    def __init__(self):
        super().__init__()
        self.token, self.body = nn.Parameter(torch.zeros(3)), nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x):
        return self.body(x) + self.token


def seen_by_default(watch, model, *args):
    seen = watch(model)
    with torch.no_grad():
        model(*args)
    seen.tap.step()
    return seen


@pytest.mark.parametrize("norm", [weight_norm, spectral_norm])
def test_a_parametrized_layer_is_watched(watch, same, norm):
    """A layer whose only children are its parametrizations is a leaf in every sense that matters."""
    model, x = nn.Sequential(norm(nn.Linear(3, 4)), nn.ReLU()), torch.randn(2, 3)
    seen = seen_by_default(watch, model, x)
    assert seen.places == ["0.parametrizations.weight.0:output", "0:output", "1:output", ":output"]
    assert same(seen.one("0:output"), model[0](x))


def test_a_module_of_parameter_lists_is_watched(watch):
    """Lists and dicts of parameters are never called, so that the module around them does the work."""
    model = nn.Sequential(nn.Linear(3, 3), Scale())
    assert seen_by_default(watch, model, torch.randn(2, 3)).places == ["0:output", "1:output", ":output"]


def test_a_root_of_parameters_only(watch):
    """A root without any module in it is watched and verified."""
    assert seen_by_default(watch, Scale(), torch.randn(3)).places == [":output"]
    assert tt.verify(Scale(), torch.randn(3)).same_outputs


def test_modules_with_parameters_of_their_own_are_watched(watch):
    """Attention's output is there, though a module in it is a layer too; containers that only call others are not."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(2, 5, 4)
    assert {"0:output[0]", "0:output[1]"} <= set(seen_by_default(watch, Around(attention), x, x, x).places)
    model = nn.Sequential(Token(), nn.Sequential(nn.Linear(3, 3)))
    places = seen_by_default(watch, model, torch.randn(2, 3)).places
    assert places == ["0.body.0:output", "0.body.1:output", "0:output", "1.0:output", ":output"]


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.add_module("0", inner)

    def forward(self, *args):
        return self.get_submodule("0")(*args)


def test_fused_layers_stay_fused(watch):
    """The default puts no hook where it would switch a fused path off, and says what ran fused."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    model, x = Around(nn.TransformerEncoder(layer, 2)).eval(), torch.randn(2, 5, 4)
    with torch.no_grad():
        expected = model(x)
        seen = watch(model)
        assert torch.equal(model(x), expected)
    seen.tap.step()
    assert seen.places == [":output"]
    assert "ran fused" in seen.unseen()["0.layers.0.self_attn:output"]
