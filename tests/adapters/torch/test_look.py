"""The quick looks: what can be tapped, what comes out where, and the proof that nothing is changed."""

import copy
import random
import re

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.errors import ProbeError


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 4))


def test_sites_lists_modules_and_parameters():
    """Every module and parameter is listed with the ports it has."""
    found = {site.path: site.ports for site in tt.sites(net())}
    assert found["0"] == found[""] == ("output", "input", "grad_output", "grad_input")
    assert found["0.weight"] == ("param", "grad", "update")
    assert "BatchNorm1d" in str(tt.sites(net()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_sites_says_what_cannot_be_tapped_and_why():
    """A scripted module is listed as not tappable, with the reason."""
    found = tt.sites(nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.ReLU()))
    assert "script" in found.untappable["0"]
    assert "0  " in str(found) and "not tappable" in str(found)


@pytest.mark.parametrize("given", [("0", torch.ones(2, 8)), ("0", (torch.ones(2, 8),)), (torch.ones(2, 8), net())])
def test_capture_says_what_comes_first(given):
    """Where a pattern is no pattern, the call is shown as it should be."""
    with pytest.raises(ProbeError, match=r"^capture\(model, batch, patterns\).*: write capture\(model, batch, '.*'\)"):
        tt.capture(net(), *given)


def test_capture_gives_copies_in_order_of_execution():
    """The tensors are what plain hooks see, unharmed by later in-place operations."""
    model, x = net().eval(), torch.randn(3, 8)
    seen = {}
    handle = model[1].register_forward_hook(lambda m, i, o: seen.update(bn=o.clone()))
    got = tt.capture(model, x, "1", "0:input", "4")
    handle.remove()
    assert list(got) == ["0:input", "1", "4"]
    assert torch.equal(got["1"], seen["bn"])
    assert torch.equal(got["0:input"], x)
    assert torch.equal(got.output, got["4"])


def test_capture_takes_tuples_dicts_and_nested_outputs():
    """Arguments may be a tuple or keywords, and tensors inside structures have slots."""

    class Two(nn.Module):
        def forward(self, a, b):
            return {"sum": a + b, "parts": (a, b)}

    one = torch.ones(2)
    by_tuple = tt.capture(Two(), (one, 2 * one), "**")
    by_name = tt.capture(Two(), {"a": one, "b": 2 * one}, "**")
    assert list(by_tuple) == list(by_name) == [":output.sum", ":output.parts[0]", ":output.parts[1]"]
    assert torch.equal(by_tuple[":output.sum"], 3 * one)


def test_capture_keeps_every_call_of_a_reused_module():
    """The second call of one module does not overwrite the first."""

    class Reuse(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(self.act(x) - 1)

    got = tt.capture(Reuse(), torch.tensor([2.0, 0.5]), "act")
    assert list(got) == ["act", "act#1"]
    assert got["act#1"].tolist() == [1.0, 0.0]


def test_capture_leaves_no_hook_even_after_an_exception():
    """Hooks are gone when the model raises."""
    model = net()
    with pytest.raises(RuntimeError):
        tt.capture(model, torch.randn(3, 5), "0")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_capture_without_a_site_says_what_to_write():
    """No pattern is an error that shows the corrected call."""
    with pytest.raises(tt.TensortapError, match=r'capture\(model, x, "layer1"\)'):
        tt.capture(net(), torch.randn(3, 8))


def test_verify_proves_that_nothing_changes():
    """Outputs, gradients, buffers and random state are the same bits with and without taps."""
    proof = tt.verify(net(), torch.randn(4, 8), "**", "**:grad_output", "**:grad_input", "**:param", repeats=1)
    assert proof and proof.deterministic and proof.same_outputs and proof.same_gradients and not proof.left_behind
    assert proof.records > 10 and proof.bytes_per_step > 0
    assert "bit for bit the same" in str(proof)
    assert re.search(r"cost +×\d+\.\d+ step time, \d+ records and [\d.]+ \wB a step", str(proof))


def test_verify_leaves_everything_as_it_was():
    """Weights, buffers, gradients, modes and the three random generators are untouched."""
    model = net()
    model[0].eval()
    model(torch.randn(4, 8)).sum().backward()
    state = copy.deepcopy(model.state_dict())
    grads = [p.grad.clone() for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    batch = torch.randn(4, 8)
    seeds = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    tt.verify(model, batch, repeats=1)
    seeds_after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert torch.equal(seeds[0], seeds_after[0])
    assert seeds[1] == seeds_after[1] and (seeds[2] == seeds_after[2]).all()
    assert [m.training for m in model.modules()] == modes and modes[0] and not modes[1]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_verify_does_not_blame_taps_for_a_model_that_differs_from_itself():
    """A model that is not deterministic is said to be so."""

    class Restless(nn.Module):
        calls = 0

        def forward(self, x):
            Restless.calls += 1
            return x + Restless.calls

    proof = tt.verify(Restless(), torch.ones(2), repeats=1)
    assert not proof.deterministic and proof.same_outputs
    assert "not deterministic" in str(proof)


def test_verify_notices_a_tap_that_changes_something():
    """A reducer that writes into the tensor it was shown is caught, and the difference is described."""

    def vandal(x):
        x.mul_(2)
        return 0.0

    proof = tt.verify(net(), torch.randn(4, 8), tt.probe("0", keep=vandal), repeats=1)
    assert not proof and not proof.same_outputs
    assert any("differs by at most" in line for line in proof.differences)


def test_verify_runs_the_users_own_step():
    """A function is run as it is, and what it returns is compared."""
    model, x = net(), torch.randn(4, 8)

    def step():
        loss = model(x).pow(2).mean()
        loss.backward()
        return loss

    assert tt.verify(model, step, repeats=1)


def test_verify_keeps_the_fused_path_and_says_what_it_did_not_see():
    """An encoder in inference keeps its fused path, bit for bit, and what lies inside is reported."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    with torch.no_grad():
        proof = tt.verify(model, torch.randn(2, 5, 16), repeats=1)
    assert proof and proof.unseen and "fused" in str(proof)


def test_an_object_of_no_framework_cannot_be_watched():
    """The error names the type and what to do instead."""
    with pytest.raises(tt.TensortapError, match="type int cannot be watched"):
        tt.watch(3)


def test_capture_of_one_slot_gives_that_slot():
    """A pattern with a slot captures that part of a nested value and no other."""

    class Two(nn.Module):
        def forward(self, x):
            return x, x + 1

    assert list(tt.capture(Two(), torch.ones(2), ":output[1]")) == [":output[1]"]


def test_capture_of_the_root_goes_by_its_port():
    """The root has no path, so what it returns is called :output, also after others."""
    assert list(tt.capture(nn.Sequential(nn.ReLU()), torch.ones(2), "**")) == ["0", ":output"]


@pytest.mark.parametrize("look", [tt.verify, lambda model, batch: tt.capture(model, batch, "**")])
def test_a_list_of_arguments_is_explained(look):
    """A list is one argument: the model's own TypeError says what to write for several."""
    with pytest.raises(TypeError) as caught:
        look(nn.Linear(4, 3), [torch.ones(2, 4), torch.ones(2, 4)])
    assert "for 2 arguments, write a tuple" in caught.value.__notes__[0]
