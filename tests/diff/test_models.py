"""Faults planted in real small models, and models that are the same."""

from __future__ import annotations

import copy
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.errors import UnsupportedError


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.softmax = nn.Softmax(-1)
        self.proj = nn.Linear(width, width)
        self.hidden_cast = False

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.hidden_cast:
            return self.proj(torch.softmax(scores.bfloat16(), -1).to(x.dtype) @ v)
        return self.proj(self.softmax(scores).to(x.dtype) @ v)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)),
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 6, width: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 20)

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Port(nn.Module):
    """The same network by another hand: other names, and no list of blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class LowSoftmax(nn.Softmax):
    def forward(self, x):
        return super().forward(x.bfloat16())


X = torch.arange(40).reshape(4, 10) % 20


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def test_the_same(model):
    """A model and its copy are the same, bit for bit."""
    found = tt.compare(model, copy.deepcopy(model), X)
    assert found and found.first_unequal is None
    assert {row.worst.kept for row in found} == {"full"}
    assert any(row.site.endswith(":param") for row in found) and ":output" in [row.site for row in found]
    assert (found.a, found.b) == ("Transformer", "Transformer")


def test_wrong_epsilon(model):
    """A wrong epsilon in one LayerNorm of 12 is found in that LayerNorm."""
    wrong = copy.deepcopy(model)
    wrong.blocks[3].norm2.eps = 1e-3
    found = tt.compare(model, wrong, X)
    assert not found and found.first.site == "blocks.3.norm2:output"
    assert 1e-4 < found.first.error < 1e-3
    assert all(row.differs is False for row in found if row.site.startswith("blocks.2"))


def test_wrong_epsilon_by_statistics(model, tmp_path):
    """Statistics alone, over steps, find it too."""
    wrong = copy.deepcopy(model)
    wrong.blocks[3].norm2.eps = 1e-3
    for network, name in ((model, "a"), (wrong, "b")):
        with tt.watch(network, "**", to=tmp_path / name) as tap:
            for n in range(2):
                network((X + n) % 20)
                tap.step()
    found = tt.diff(tmp_path / "a", tmp_path / "b")
    assert (found.first.site, found.first.step, found.first.kept) == ("blocks.3.norm2:output", 0, "")


def test_transposed_weight():
    """A square weight that was transposed in a port is found though no name is the same."""
    torch.manual_seed(0)
    old, new = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), Port()
    for ours, theirs in ((old[0], new.up), (old[2], new.down)):
        theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 16)
    found = tt.compare(old, new, x, "?*")
    assert found and found.aligned_by == "order" and not found.only_in_a
    new.down.weight.data = old[2].weight.data.T.contiguous()
    found = tt.compare(old, new, x)
    assert (found.first.site, found.first.site_b) == ("2:output", "down:output")
    assert "its parameters differ: 2.weight:param" in str(found)


@pytest.mark.parametrize("visible", [False, True])
def test_low_softmax(model, visible):
    """A softmax in bf16 is found, whether its type is to be seen or was cast back where nobody looks."""
    low = copy.deepcopy(model)
    low.blocks[2].attn.hidden_cast = not visible
    if visible:
        low.blocks[2].attn.softmax = LowSoftmax(-1)
    found = tt.compare(model, low, X)
    assert found.first.site == ("blocks.2.attn.softmax:output" if visible else "blocks.2.attn.proj:output")
    assert bool(found.dtypes) is visible


def test_flipped_bit(model):
    """One flipped bit in one weight is found, in its layer and in the weight."""
    flipped = copy.deepcopy(model)
    flipped.blocks[4].mlp[0].weight.data.view(torch.int32)[3, 5] ^= 1 << 25
    found = tt.compare(model, flipped, X)
    assert found.first.site == "blocks.4.mlp.0:output"
    assert found.first.bit_equal == pytest.approx(15 / 16, abs=0.01)
    weight = next(row.worst for row in found if row.site == "blocks.4.mlp.0.weight:param")
    assert round((1 - weight.bit_equal) * weight.elements) == 1
    assert "its parameters differ: blocks.4.mlp.0.weight:param" in list(found.remarks())


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.thorough) for each in (torch.float16, torch.float64))],
)
def test_other_precision(model, dtype):
    """The same model in another precision is within the tolerance, and the change is told."""
    found = tt.compare(model, copy.deepcopy(model).to(dtype), X)
    assert found, str(found)
    assert found.first_unequal is not None and len(found.dtypes) == 1


def test_autocast(model):
    """Under autocast types are mixed, and what comes after a rounding is judged by it."""

    class Cast(nn.Module):
        def __init__(self, inner: nn.Module, enabled: bool) -> None:
            super().__init__()
            self.inner, self.enabled = inner, enabled

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
                return self.inner(x)

    found = tt.compare(Cast(model, False), Cast(model, True), X)
    assert found, str(found)
    assert {row.worst.dtype_b for row in found} == {"float32", "bfloat16"}


def test_a_fault_in_low_precision(model):
    """A fault larger than rounding is found in bf16 too."""
    wrong = copy.deepcopy(model).bfloat16()
    wrong.blocks[1].norm1.weight.data *= 2
    found = tt.compare(model, wrong, X)
    assert found.first.site == "blocks.1.norm1:output"


def test_map():
    """Renamed modules are found through a map."""
    torch.manual_seed(0)
    old = nn.ModuleDict({"enc": nn.Linear(8, 8), "dec": nn.Linear(8, 8)})
    new = nn.ModuleDict({"encoder": copy.deepcopy(old["enc"]), "decoder": copy.deepcopy(old["dec"])})
    old.forward = lambda x: old["dec"](old["enc"](x))
    new.forward = lambda x: new["decoder"](new["encoder"](x))
    found = tt.compare(old, new, torch.ones(2, 8), map={"enc": "encoder", "dec": "decoder"})
    assert found and found.aligned_by == "name" and not found.only_in_b


def test_gradients(model):
    """A probe for gradients brings a backward pass; what differs only there is found there."""
    other = copy.deepcopy(model)
    other.head.weight.register_hook(lambda gradient: gradient * 1.5)
    assert tt.compare(model, other, X)
    found = tt.compare(model, other, X, "**:grad")
    assert [row.site for row in found if row.differs] == ["head.weight:grad"]


def test_untouched(model):
    """Models, their gradients and buffers, hooks and every random state are what they were."""
    model = nn.Sequential(model, nn.Flatten(0, 1), nn.BatchNorm1d(20), nn.Dropout())
    model(X).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    found = tt.compare(model, copy.deepcopy(model), X, "**", "**:grad")
    assert found and found.first_unequal is None  # dropout draws the same numbers twice
    assert torch.equal(torch.get_rng_state(), states[0]) and np.random.get_state()[1].tolist() == states[1]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert model.training


def test_large(monkeypatch):
    """Of large tensors the same sample is kept under any name."""
    comparing = import_module("tensortap.compare")
    monkeypatch.setattr(comparing, "LARGE", 100)
    monkeypatch.setattr(comparing, "KEEP", (*comparing.KEEP[:-1], comparing._OfLarge(60)))
    torch.manual_seed(0)
    old, new = nn.Sequential(nn.Linear(16, 16)), nn.ModuleDict({"fc": nn.Linear(16, 16)})
    new["fc"].load_state_dict(old[0].state_dict())
    new.forward = lambda x: new["fc"](x)
    found = tt.compare(old, new, torch.randn(50, 16), map={"0": "fc"})
    assert found and {(row.worst.kept, row.worst.elements) for row in found} == {("sample", 60), ("full", 16)}


def test_functions():
    """Functions that name their values are models too, in any framework: here a port from PyTorch to NumPy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
    weight, bias = (p.detach().numpy() for p in model.parameters())

    def port(x):
        y = tt.tap(x.numpy() @ weight.T + bias, "linear")
        return tt.tap(np.maximum(y, 0), "relu")

    assert tt.compare(model, port, torch.randn(3, 6), map={"0": "linear", "1": "relu"})


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize("x", [np.ones((3, 4), np.float32), torch.ones(3, 4)], ids=["numpy", "torch"])
@pytest.mark.parametrize("around", [lambda x: x, lambda x: (x,), lambda x: {"x": x}], ids=["bare", "tuple", "dict"])
def test_each_side_is_called_with_its_own_arrays(x, around):
    """A batch of NumPy's arrays is one of tensors for a PyTorch model, and tensors are arrays for a NumPy function."""
    model = Dense()
    weight, bias = (p.detach().numpy() for p in model.parameters())

    def port(x):
        return tt.tap(x.astype(np.float32) @ weight.T + bias, "dense")

    assert tt.compare(model, port, around(x), map={"fc": "dense"})
    assert tt.compare(port, model, around(x), map={"dense": "fc"})


def test_a_pytorch_function_beside_a_model():
    """A function of tensors is called with tensors where the batch is one of NumPy's arrays."""
    model = Dense()
    port = lambda x: tt.tap(nn.functional.linear(x, model.fc.weight, model.fc.bias), "dense")  # noqa: E731
    assert tt.compare(model, port, np.ones((3, 4), np.float32), map={"fc": "dense"})


def test_arrays_within_arguments():
    """Arrays in tuples and dicts of a batch are converted too, also where both are of one framework."""

    class Sum(nn.Module):
        def forward(self, parts):
            return torch.add(parts["x"][0], parts["x"][1])

    one = np.ones((2, 3), np.float32)
    assert tt.compare(Sum(), Sum(), ({"x": (one, one)},))


def test_a_function_that_fails_keeps_its_error():
    """A function that takes no kind of array raises what it raised first."""

    def port(x):
        raise TypeError("not for arrays")

    with pytest.raises(TypeError, match="not for arrays"):
        tt.compare(nn.Linear(4, 2), port, torch.ones(3, 4))


def test_no_model():
    """What cannot be called cannot be compared."""
    with pytest.raises(UnsupportedError, match="int"):
        tt.compare(3, 4, X)


def test_a_function_that_names_nothing_is_refused():
    """A function without named values has nothing to be compared by, and is told how to name them."""
    with pytest.raises(UnsupportedError, match=r"the function <lambda> named no value .*tensortap\.tap\(x, 'name'\)"):
        tt.compare(nn.Linear(4, 4), lambda x: x, torch.ones(2, 4))


def test_a_batch_that_one_framework_does_not_take():
    """The model's own error is raised, with a note on how two frameworks are compared."""

    class Net:
        def __init__(self):
            self.act = np.tanh

        def __call__(self, x):
            assert isinstance(x, np.ndarray)
            raise TypeError("two arrays, please")

    with pytest.raises(TypeError, match="two arrays, please") as caught:
        tt.compare(nn.Linear(4, 4), Net(), torch.ones(2, 4))
    assert "these are of torch and numpy" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError) as caught:
        tt.compare(nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(2, 5))
    assert not hasattr(caught.value, "__notes__")


def test_models_that_begin_with_other_parameters():
    """Of two models that were never trained nothing is said of updates: a parameter begins with another value."""
    torch.manual_seed(0)
    a = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    b = copy.deepcopy(a)
    b[1].weight.data += 1
    found = tt.compare(a, b, torch.ones(2, 4))
    assert str(found.cause) == "parameter at step 0: 1.weight:param: it begins with another value"
