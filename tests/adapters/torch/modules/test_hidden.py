"""Pickles, copies, exported programs and scripted modules of a watched model are those of an unwatched one."""

from __future__ import annotations

import collections
import copy
import copyreg
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import tensortap as tt

EVERYTHING = ("**:{output,input,grad_output,grad_input}", "op:@matmul")


def users_hook(module: nn.Module, args: Any, output: Any) -> None:
    """Do nothing; it belongs to the user and stays in every pickle."""


class Gated(nn.Module):
    """Has hooks of its own, state of its own, and a way of its own to be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.Linear(3, 3)
        self.kept = collections.OrderedDict({1: True, 2: "two"})
        self.gate.register_forward_hook(users_hook, always_call=True)
        self.gate.register_forward_pre_hook(users_pre_hook, with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "saved": True}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.gate(x)


def users_pre_hook(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Do nothing, as above."""


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4)), nn.Linear(4, 3))


def traced_by_fx() -> nn.Module:
    return torch.fx.symbolic_trace(plain())


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


MODELS = [plain, Gated, traced_by_fx, encoder]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_pickles_and_copies_have_no_trace_of_a_tap(watch, make):
    """Every byte of a pickle, of torch.save and of a deep copy is that of the unwatched model."""
    model = make().eval()

    def written() -> list[bytes]:
        pickles = [pickle.dumps(model, protocol) for protocol in range(2, 6)]
        return [*pickles, saved(model), saved(copy.deepcopy(model)), saved(model.state_dict())]

    x = torch.randn(4, 5, 4) if make is encoder else torch.randn(4, 3)
    with torch.no_grad():
        model(x)
    bare = written()
    seen = watch(model, *EVERYTHING, on_nonfinite="record")
    with torch.no_grad():
        model(x)
    assert written() == bare
    seen.tap.step()
    assert seen.records
    twin = copy.deepcopy(model)
    hooks = [h for m in twin.modules() for h in [*m._forward_hooks.values(), *m._forward_pre_hooks.values()]]
    assert not any("tensortap" in type(hook).__module__ for hook in hooks)


def test_torch_load_with_weights_only_opens_it(watch):
    """A model saved under a tap is opened by the restricted unpickler with PyTorch's own classes."""
    model = plain()
    watch(model, *EVERYTHING)
    model(torch.randn(4, 3)).sum().backward()
    allowed = [nn.Sequential, nn.Linear, nn.ReLU, nn.BatchNorm1d, set]
    with torch.serialization.safe_globals(allowed):
        opened = torch.load(io.BytesIO(saved(model)), weights_only=True)
    assert [type(m) for m in opened.modules()] == [type(m) for m in model.modules()]


def test_dicts_of_the_users_are_pickled_whole(watch):
    """An OrderedDict that looks like PyTorch's dicts of flags keeps its entries and attributes."""
    model = plain()
    watch(model, *EVERYTHING)
    keys = [key for m in model.modules() for key in m._forward_hooks]
    flags = collections.OrderedDict.fromkeys(keys, True)
    flags.version = 2  # type: ignore[attr-defined]
    opened = pickle.loads(pickle.dumps(flags))
    assert opened == flags and opened.version == 2 and keys


def test_closing_puts_the_registry_of_pickle_back():
    """With the last tap gone, nothing of ours is in copyreg or in TorchScript; others' entries come back."""
    create = torch.jit._recursive.create_script_module
    before = copyreg.dispatch_table.get(collections.OrderedDict)
    with tt.watch(plain(), to=tt.Memory()), tt.watch(plain(), to=tt.Memory()):
        assert collections.OrderedDict in copyreg.dispatch_table
    assert copyreg.dispatch_table.get(collections.OrderedDict) is before
    assert torch.jit._recursive.create_script_module is create


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripting_a_watched_model(watch):
    """torch.jit.script makes of a watched model what it makes of any, and the taps stay on."""
    model, x = plain().eval(), torch.randn(4, 3)
    bare = torch.jit.script(model)
    seen = watch(model, *EVERYTHING)
    scripted = torch.jit.script(model)
    assert str(scripted.inlined_graph) == str(bare.inlined_graph)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in scripted.modules())
    scripted(x)
    seen.tap.step()
    assert not [r for r in seen.records if r.place.port == "output"]
    model(x)
    seen.tap.step()
    assert [r for r in seen.records if r.place.port == "output"]


def test_exporting_a_watched_model(watch):
    """torch.export makes of a watched model what it makes of any."""
    model, x = plain().eval(), (torch.randn(4, 3),)
    bare = torch.export.export(model, x)
    watch(model, *EVERYTHING)
    program = torch.export.export(model, x)
    assert program.graph_module.code == bare.graph_module.code
    assert str(program.graph_signature) == str(bare.graph_signature)
    assert pickle.dumps(list(program.state_dict)) == pickle.dumps(list(bare.state_dict))
