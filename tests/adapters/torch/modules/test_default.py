"""What is watched of a PyTorch model when no probe is given."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
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


class Residual(nn.Module):
    """Adds what it was given to what the modules in it computed."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def forward(self, x):
        return x + self.body(x)


class ChangesInPlace(nn.Module):
    """Returns the very tensor that the module in it returned, with other values."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return torch.relu_(self.fc(x))


class Reshapes(nn.Module):
    """Returns a view of what the module in it returned, and its input."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x).view(-1).view(x.shape), x


class Skips(nn.Module):
    """Calls the module in it and returns its input; in every second call something of its own."""

    def __init__(self, begin):
        super().__init__()
        self.fc, self.calls = nn.Linear(3, 3), begin

    def forward(self, x):
        self.fc(x)
        self.calls += 1
        return x * 2 if self.calls % 2 else x


@pytest.mark.parametrize(
    ("module", "computes"),
    [(Residual(), True), (ChangesInPlace(), True), (Reshapes(), False), (Skips(0), True), (Skips(1), False)],
)
def test_a_module_that_computes_beyond_what_it_calls_is_watched(watch, module, computes):
    """The first call tells whether an output is none of what went in or what inner modules returned."""
    model = Around(module)
    seen = watch(model)
    for _ in range(2):
        model(torch.randn(2, 3))
        seen.tap.step()
    assert [seen.places.count(place) for place in ("0:output", "0.body:output")] == [2 if computes else 0, 0]
    assert seen.unseen() == {}


def test_values_of_what_was_decided_by_a_call(watch, same):
    """The call that decides is recorded itself."""
    model, x = Around(Residual()), torch.randn(2, 3)
    with torch.no_grad():
        assert same(seen_by_default(watch, model, x).one("0:output"), model(x))


def test_a_module_that_runs_first_in_a_later_step_is_decided_then(watch):
    """What has not run stays open, and costs nothing until it runs."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.later = Residual(), Residual()

        def forward(self, x, both):
            x = self.first(x)
            return self.later(x) if both else x

    model = Late()
    seen = watch(model)
    for both in (False, False, True, True):
        model(torch.randn(2, 3), both)
        seen.tap.step()
    assert [seen.places.count(f"{name}:output") for name in ("first", "later")] == [4, 2]


def test_deciding_leaves_no_hook_where_nothing_is_recorded(watch):
    """After the first step modules that only call others carry no hook of ours."""
    model = Around(nn.Sequential(nn.Sequential(nn.Linear(3, 3)), Residual()))
    seen = watch(model)
    for _ in range(2):
        model(torch.randn(2, 3))
        seen.tap.step()
    model(torch.randn(2, 3))
    assert [n for n, m in model.named_modules() if m._forward_hooks] == ["", "0.0.0", "0.1", "0.1.body.0", "0.1.body.1"]
    assert [n for n, m in model.named_modules() if m._forward_pre_hooks] == [""]


def test_memory_is_not_kept_to_decide(watch):
    """Notes of what modules returned do not keep it alive."""
    freed = []

    class Frees(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            storage = StorageWeakRef(self.fc(x).untyped_storage())
            freed.append(storage.expired())
            return x + 1

    with torch.no_grad():
        seen_by_default(watch, Around(Frees()), torch.randn(2, 3))
    assert freed == [True]


def test_sites_of_a_call_say_what_is_watched_by_default():
    """Given a batch, `default` is known of modules that call others too."""
    model = Around(nn.Sequential(Residual(), Reshapes()))
    assert {s.path for s in tt.sites(model) if s.default} == {"", "0.0.body.0", "0.0.body.1", "0.1.fc"}
    known = {s.path for s in tt.sites(model, torch.randn(2, 3)) if s.default}
    assert known == {"", "0.0", "0.0.body.0", "0.0.body.1", "0.1.fc"}


def test_presets_of_scripts_decide_too(watch):
    """A preset that also asks for gradients of every module sees own outputs once."""
    from tensortap.script.options import PRESETS

    model = Around(Residual())
    seen = watch(model, *PRESETS["gradients"])
    for _ in range(2):
        model(torch.randn(2, 3)).sum().backward()
        seen.tap.step()
    assert seen.places.count("0:output") == 2 and seen.places.count("0:grad_output") == 2


def test_deciding_about_nested_modules_walks_no_tree():
    """A model twice as deep is walked no more than twice as far when its first call decides."""

    def calls(levels):
        model = nn.Linear(2, 2)
        for _ in range(levels):
            model = nn.Sequential(model)
        x, count = torch.ones(1, 2), 0

        def seen(frame, event, arg):
            nonlocal count
            count += event == "call" and frame.f_code is nn.Module.named_modules.__code__

        with tt.watch(model, to=[]):
            before = sys.getprofile()
            sys.setprofile(seen)
            try:
                model(x)
            finally:
                sys.setprofile(before)
        return count

    calls(3)
    assert calls(40) <= 2 * calls(20)
