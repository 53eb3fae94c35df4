"""A PyTorch model against its export: parameters keep their names there, outputs do not."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("torch")

import torch
from onnx import helper, numpy_helper
from onnx_sessions import session, value
from torch import nn

import tensortap as tt


class Net(nn.Module):
    """Two layers with a norm between them; relu before the norm, which ONNX Runtime fuses into the layer, or tanh."""

    def __init__(self, relu=False):
        super().__init__()
        self.fc, self.ln, self.head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.relu = relu

    def forward(self, x):
        x = self.fc(x)
        return self.head(self.ln(torch.relu(x)) if self.relu else torch.tanh(self.ln(x)))


def exported(model):
    """Return a session of the nodes that torch.onnx.export makes of it."""
    norm = ["LayerNormalization", "/ln/Norm_0", "ln.weight", "ln.bias"]
    middle = [["Relu", "/Relu_0"], norm] if model.relu else [norm, ["Tanh", "/Tanh_0"]]
    nodes, last = [helper.make_node("Gemm", ["x", "fc.weight", "fc.bias"], ["/fc/Gemm_0"], transB=1)], "/fc/Gemm_0"
    for kind, gives, *weights in middle:
        nodes.append(helper.make_node(kind, [last, *weights], [gives]))
        last = gives
    nodes.append(helper.make_node("Gemm", [last, "head.weight", "head.bias"], ["10"], transB=1))
    constants = [numpy_helper.from_array(p.detach().numpy(), name) for name, p in model.named_parameters()]
    return session(nodes, [value("x", [8, 16])], [value("10", [8, 4])], constants)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(8, 16)


def test_names_the_wrong_layer(x):
    """The layer that differs is named without probes, though all parameters match by name."""
    model = Net().eval()
    net = exported(model)
    assert tt.compare(model, net, x)
    model.ln.eps = 1e-2
    found = tt.compare(model, net, x)
    assert found.first is not None and found.first.name == "ln:output → /ln/Norm_0:output"
    assert sum(row.site.endswith(":param") for row in found) == 6


@pytest.mark.parametrize("probes", [(), ("**",)])
def test_fused_layer_is_no_divergence(x, probes):
    """A layer that is one with its activation in the other is not compared, as everything behind it agrees."""
    model = Net(relu=True).eval()
    found = tt.compare(model, exported(model), x, *probes)
    assert found and found.wrong_pairs == ("fc:output → /Relu_0:output",)
    assert "fc:output" in found.only_in_a and "/Relu_0:output" in found.only_in_b
    assert any("they are not true pairs: 1 pair" in remark for remark in found.remarks())


def test_differing_last_layer_is_a_divergence(x):
    """What differs with nothing behind it that agrees is a divergence."""
    model = Net().eval()
    net = exported(model)
    with torch.no_grad():
        model.head.bias += 1
    found = tt.compare(model, net, x)
    assert not found and found.wrong_pairs == ()
