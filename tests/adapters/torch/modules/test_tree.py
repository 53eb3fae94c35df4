"""The walk over a module tree, and hooks that are registered without PyTorch's own function."""

from __future__ import annotations

import torch
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.modules.hookset import new_hook_key, register_after
from tensortap.adapters.torch.modules.tree import describe_tree, modules_of


class Renaming(nn.Module):
    """Has a walk of its own, in which a module has another name."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3))

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        for path, module in super().named_modules(memo, prefix, remove_duplicate):
            yield path.replace("inner", "renamed"), module

    def forward(self, x):
        return self.inner(x)


class Counting(nn.Linear):
    """Counts the hooks that are registered on it."""

    registered = 0

    def register_forward_hook(self, *args, **kwargs):
        self.registered += 1
        return super().register_forward_hook(*args, **kwargs)


def nested() -> nn.Module:
    """A tree with a shared module, a name that stands for nothing, and containers."""
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ModuleList([shared, nn.ModuleDict({"a": nn.ReLU()})]), Renaming())
    model.register_module("nothing", None)
    return model


def test_the_walk_is_that_of_pytorch():
    """Shared modules are found under every path, in PyTorch's order, and a class's own walk is used."""
    model = nested()
    assert modules_of(model) == list(model.named_modules(remove_duplicate=False))
    assert [path for path, _ in modules_of(model)][-2:] == ["2.renamed", "2.renamed.0"]


def test_wrappers_of_the_compiler_are_left_out():
    """A compiled model, and compiled modules in it, have the paths of the original."""
    plain, wrapped = nested(), nested()
    wrapped[0] = torch.compile(wrapped[0], backend="eager")
    wrapped[2] = torch.compile(wrapped[2], backend="eager")
    found = modules_of(torch.compile(wrapped, backend="eager"))
    assert [path for path, _ in found] == [path for path, _ in modules_of(plain)]
    assert not any(type(module).__name__ == "OptimizedModule" for _, module in found)


def test_parameters_are_counted_once():
    """A parameter with two names in a module counts once; a lazy one, which has no shape yet, does not count."""
    module = nn.Linear(3, 3)
    module.again = module.weight
    assert [row["parameters"] for row in describe_tree(nn.Sequential(module, nn.LazyLinear(4), nn.ReLU()))] == [
        0,
        12,
        0,
        0,
    ]


def test_a_registered_hook_is_under_its_key_and_removed():
    """The hook follows those of the user, and nothing is left of it afterwards."""
    module, key, called = nn.ReLU(), new_hook_key(), []
    module.register_forward_hook(lambda *_: called.append("user's"))
    handle = register_after(module, lambda *_: called.append("ours"), key)
    module(torch.ones(2))
    assert called == ["user's", "ours"] and key in module._forward_hooks
    handle.remove()
    assert key not in module._forward_hooks and len(module._forward_hooks) == 1


def test_a_module_that_registers_hooks_itself_is_asked():
    """A class that overrides `register_forward_hook` sees ours too."""
    model = nn.Sequential(Counting(3, 3), nn.ReLU())
    with tt.watch(model, "0", to=tt.Memory()):
        assert model[0].registered == 1
    assert not model[0]._forward_hooks
