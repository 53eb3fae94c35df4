"""Quick looks leave a model and its batch as they were, whatever a forward does to them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.state import preserved
from tensortap.errors import UnsupportedError


class Grows(nn.Module):
    """A buffer that is replaced by a larger one, as positions are in wav2vec2-conformer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(2, 4))

    def forward(self, x):
        if len(self.table) < len(x):
            self.table = torch.ones(len(x), 4)
        return self.fc(x) + self.table[: len(x)]


class Appears(nn.Module):
    """A buffer that goes from None to a tensor."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", None)

    def forward(self, x):
        if self.scale is None:
            self.scale = x.detach().abs().mean()
        return self.fc(x) / self.scale


class Registers(nn.Module):
    """A buffer, a parameter and a child that are made in forward."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        self.register_buffer("seen", x.detach().clone(), persistent=False)
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 2)
            self.gain = nn.Parameter(torch.ones(1))
        return self.head(self.fc(x)) * self.gain


class ChangesType(nn.Module):
    """A buffer that becomes another type."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x):
        self.table = self.table.double()
        self._buffers["table"].add_(1)
        return self.fc(x) + self.table.float()


class ChangesData(nn.Module):
    """The same, by `data`."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))

    def forward(self, x):
        self.table.data = self.table.data.double() + 1
        return self.fc(x) + self.table.float()


class Lazy(nn.Module):
    """Layers that know their sizes after the first call only."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.LazyLinear(2)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


class KeepsState(nn.Module):
    """A counter, a list and a graph in plain attributes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.calls, self.history, self.h = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.history.append(self.calls)
        self.h = self.fc(x) if self.h is None else self.fc(x) + self.h
        return self.h * self.calls * len(self.history)


MODELS = [Grows, Appears, Registers, ChangesType, ChangesData, Lazy, KeepsState]


def described(model):
    """What a module tree is made of, as far as a run can change it."""
    return {
        path: (
            type(module),
            {n: _value(v) for n, v in module._parameters.items()},
            {n: _value(v) for n, v in module._buffers.items()},
            list(module._modules),
            sorted(module._non_persistent_buffers_set),
            {n: copy.copy(v) for n, v in vars(module).items() if n in ("calls", "history", "h", "in_features")},
            [list(d) for n, d in sorted(vars(module).items()) if n.endswith("hooks") and isinstance(d, dict)],
        )
        for path, module in model.named_modules()
    }


def _value(tensor):
    if tensor is None or nn.parameter.is_lazy(tensor):
        return type(tensor)
    return type(tensor), tensor.dtype, tensor.tolist(), None if tensor.grad is None else tensor.grad.tolist()


def same(a, b):
    return repr(a) == repr(b)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "look",
    [
        lambda model, x: tt.sites(model, x),
        lambda model, x: tt.locate_nonfinite(model, x),
        lambda model, x: tt.verify(model, x, repeats=1),
        lambda model, x: tt.compare(model, model, x),
    ],
    ids=["sites", "locate_nonfinite", "verify", "compare"],
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_the_structure_of_a_model_is_put_back(kind, look):
    """Buffers that appear, grow or change type, lazy parameters and plain attributes are as they were."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(3, 4)
    before = described(model)
    look(model, x)
    assert same(described(model), before)
    model(x)  # and it still works


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_verify_passes_whatever_state_a_model_keeps(kind):
    """State that can be put back does not make a model nondeterministic."""
    torch.manual_seed(0)
    found = tt.verify(kind(), torch.randn(3, 4), repeats=1)
    assert found and found.deterministic, str(found)


@pytest.mark.parametrize("kind", [Grows, Lazy, KeepsState])
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_a_model_that_raises_is_put_back_too(kind):
    """What an exception leaves half done is undone."""
    torch.manual_seed(0)
    model = kind()
    before = described(model)

    def step():
        model(torch.randn(3, 4))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        tt.verify(model, step, repeats=1)
    assert same(described(model), before)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, more=None):
        x += 1
        if more is not None:
            more["y"].mul_(2)
        return self.fc(x)


@pytest.mark.parametrize(
    "look",
    [
        lambda model, batch: tt.verify(model, batch, repeats=1),
        lambda model, batch: tt.sites(model, batch),
        lambda model, batch: tt.locate_nonfinite(model, batch),
        lambda model, batch: tt.compare(model, model, batch),
    ],
    ids=["verify", "sites", "locate_nonfinite", "compare"],
)
def test_a_forward_that_works_in_place_does_not_touch_the_batch(look):
    """The user's tensors, also nested ones, are what they were, and the model counts as deterministic."""
    x, y = torch.zeros(2, 4), torch.ones(3)
    found = look(InPlace(), {"x": x, "more": {"y": y}})
    assert x.tolist() == torch.zeros(2, 4).tolist() and y.tolist() == [1, 1, 1]
    assert found is None or found
    assert getattr(found, "deterministic", True)


def test_a_batch_that_requires_gradients_gets_none():
    """Backward of a quick look adds nothing to the gradients of the user's batch."""
    x = torch.zeros(2, 4, requires_grad=True)
    assert tt.verify(nn.Linear(4, 4), x * 2, repeats=1)
    assert tt.verify(nn.Linear(4, 4), x, repeats=1)
    assert x.grad is None


class Holder:
    def __init__(self):
        self.n = 0


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.holder = nn.Linear(4, 4), Holder()

    def forward(self, x):
        self.holder.n += 1
        return self.fc(x) * self.holder.n


def test_state_that_cannot_be_put_back_is_named():
    """A model with state in an object of its own is told apart from one that is not deterministic."""
    found = tt.verify(Counts(), torch.ones(2, 4), repeats=1)
    assert not found.deterministic and found.unrestored == ("holder",)
    assert "keeps state in holder" in str(found)

    class Random(nn.Module):
        def forward(self, x):
            return x + next(numbers)

    numbers = iter(range(1000))
    assert "not deterministic" in str(tt.verify(Random(), torch.ones(2), repeats=1))


def test_a_graph_of_an_earlier_step_is_named():
    """A graph that the user's own step has left in an attribute is named, with what to write."""
    model, x = KeepsState(), torch.ones(2, 4)
    model(x).sum().backward()
    with pytest.raises(UnsupportedError, match=r"'h'.*self\.h = self\.h\.detach\(\)"):
        tt.verify(model, x, repeats=1)


class Opaque:
    __slots__ = ("_hidden",)

    def __init__(self, tensor):
        self._hidden = lambda: tensor


class Returns(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.fc, self.wrap = nn.Linear(4, 4), wrap

    def forward(self, x):
        return self.wrap(self.fc(x))


@pytest.mark.parametrize("wrap", [Opaque, lambda x: None, lambda x: x.tolist()])
def test_verify_that_compares_nothing_does_not_pass(wrap):
    """A model that returns no tensor proves nothing, and `verify` says so."""
    found = tt.verify(Returns(wrap), torch.ones(2, 4), repeats=1)
    assert not found and "nothing to compare" in str(found)
    assert "bit for bit" not in str(found)


def test_preserving_goes_on_after_an_error():
    """One tensor that cannot be put back does not keep the others from it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    kept = model[1].weight.clone()
    with pytest.raises(RuntimeError, match="mine"), preserved(model):
        with torch.no_grad():
            model[1].weight.add_(1)
        model[0].__dict__["_parameters"] = None
        raise RuntimeError("mine")
    assert torch.equal(model[1].weight, kept)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_printing_nested_tensors():
    """`print(tt.capture(...))` works where a layer returns a nested tensor."""

    class Nested(nn.Module):
        def __init__(self, layout):
            super().__init__()
            self.act, self.layout = nn.Identity(), layout

        def forward(self, x):
            return self.act(torch.nested.nested_tensor([x, x[:1]], layout=self.layout))

    for layout in (torch.strided, torch.jagged):
        assert "act  nested, 2 tensors torch.float32" in str(tt.capture(Nested(layout), torch.ones(3, 4), "act"))


def test_capture_of_many_calls_keeps_all():
    """Thousands of calls of one layer are numbered in order."""

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            for _ in range(3000):
                x = self.act(x)
            return x

    found = tt.capture(Loop(), torch.ones(1), "act")
    assert list(found)[:3] == ["act", "act#1", "act#2"] and list(found)[-1] == "act#2999"
