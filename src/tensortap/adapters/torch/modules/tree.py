"""Walk a module tree: which modules and parameters can be tapped, and why others cannot."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from tensortap.adapters.torch.autograd.members import Owner
from tensortap.select.ports import BUFFER_PORTS, MODULE_PORTS, PARAMETER_PORTS
from tensortap.select.sites import Candidate

SCRIPTED: Final = "a scripted module takes no hooks; watch the module it was scripted from"
CONTAINER: Final = "is only a container and never called; tap what is in it"
FLAT: Final = (
    "is flattened into the graph around it, and only its weights are left; torch.export.unflatten() gives it back"
)
BY_WEIGHT: Final = "is used by nn.MultiheadAttention through its weights only and never called"

PARAMETRIZATIONS: Final = "parametrizations"  # what torch.nn.utils.parametrize calls its modules in another
WRAPPED: Final = "_orig_mod"  # the attribute of torch.compile's wrapper

_TRACED: Final = torch.jit._trace.TopLevelTracedModule


def modules_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module under every path it has, the root under the empty one.

    Wrappers made by torch.compile are left out: a compiled model has the paths of the original.
    """
    for path, module in root.named_modules(remove_duplicate=False):
        if not is_wrapper(module):
            yield _unwrapped_path(path), module


def _unwrapped_path(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != WRAPPED) if WRAPPED in path else path


def owners_of(root: nn.Module) -> dict[str, Owner]:
    """Return where every parameter and buffer hangs, by each of its names."""
    return {
        f"{path}.{name}" if path else name: Owner(weakref.ref(module), name, ports)
        for path, module in modules_of(root)
        for held, ports in ((module._parameters, PARAMETER_PORTS), (module._buffers, BUFFER_PORTS))
        for name, value in held.items()
        if value is not None
    }


def candidates_of(root: nn.Module) -> list[Candidate]:
    """Return the modules and parameters that can be tapped."""
    defaults = DefaultModules()
    found = [
        candidate(path, module)._replace(default=defaults.include(path, module))
        for path, module in modules_of(root)
        if not reason_untappable(module)
    ]
    return found + [Candidate(name, owner.types, owner.ports) for name, owner in owners_of(root).items()]


def candidate(path: str, module: nn.Module) -> Candidate:
    """Return a module as patterns see it."""
    return Candidate(path, _types(module), MODULE_PORTS, leaf=not any(m is not None for m in module._modules.values()))


class DefaultModules:
    """Choose the modules whose outputs are watched when no probe is given.

    These are the root, modules without a tappable module in them, and those with parameters of their own, which compute
    beyond what they call (nn.MultiheadAttention). A parametrization computes a weight and is not part of a module in
    this sense: a parametrized Linear is watched, and so is the parametrization's innermost module. Of all others only a
    call tells whether they compute (`modules/own_outputs.py`).
    """

    def __init__(self) -> None:
        self._known: dict[nn.Module, bool] = {}

    def include(self, path: str, module: nn.Module) -> bool:
        """Return whether a tappable module is watched by default."""
        if not path or not self._calls_others(module):
            return True
        own = any(parameter is not None for parameter in module._parameters.values())
        return own and PARAMETRIZATIONS not in path.split(".")

    def is_undecided(self, path: str, module: nn.Module) -> bool:
        """Return whether only a call can tell that a tappable module is watched by default."""
        return not self.include(path, module) and PARAMETRIZATIONS not in path.split(".")

    def _calls_others(self, module: nn.Module) -> bool:
        """Return whether there is a tappable module in a module, at any depth, parametrizations aside."""
        known = self._known.get(module)
        if known is None:
            inner = [m for name, m in module._modules.items() if m is not None and name != PARAMETRIZATIONS]
            self._known[module] = known = any(not reason_untappable(m) or self._calls_others(m) for m in inner)
        return known


def untappable(root: nn.Module) -> dict[str, str]:
    """Return the modules that cannot be tapped, each with the reason."""
    flat = isinstance(root, torch.fx.GraphModule)
    found = {path: why for path, module in modules_of(root) if (why := reason_untappable(module))}
    return {path: FLAT if flat and why == CONTAINER else why for path, why in found.items()}


def reason_untappable(module: nn.Module) -> str:
    """Return why hooks on a module would never run; empty when they would."""
    if is_scripted(module):
        return SCRIPTED
    if isinstance(module, torch.jit.ScriptModule) or "forward" in vars(module):
        return ""
    return CONTAINER if type(module).forward is nn.Module.forward else ""


def reason_unseen(root: nn.Module, path: str) -> str:
    """Return why a module's hooks never ran, where its place in the tree tells."""
    parent, _, name = path.rpartition(".")
    if name != "out_proj":
        return ""
    return BY_WEIGHT if isinstance(dict(modules_of(root)).get(parent), nn.MultiheadAttention) else ""


def is_wrapper(module: nn.Module) -> bool:
    """Return whether torch.compile made it around another module."""
    return type(module).__name__ == "OptimizedModule" and isinstance(getattr(module, WRAPPED, None), nn.Module)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that torch.compile was given."""
    return unwrapped(module.get_submodule(WRAPPED)) if is_wrapper(module) else module


def is_compiled(module: nn.Module) -> bool:
    """Return whether the module's calls go through torch.compile."""
    return module._compiled_call_impl is not None or is_wrapper(module)


def compiled_paths(root: nn.Module) -> set[str]:
    """Return the paths of modules that run inside compiled code."""
    inside: set[str] = set()
    for path, module in root.named_modules(remove_duplicate=False):  # parents come first
        within = bool(path) and path.rpartition(".")[0] in inside
        if within or is_compiled(module):
            inside.add(path)
    return {_unwrapped_path(path) for path in inside}


def is_scripted(module: nn.Module) -> bool:
    """Return whether TorchScript owns the module (a traced root is the exception: it takes hooks)."""
    return isinstance(module, torch.jit.ScriptModule) and not isinstance(module, _TRACED)


def describe_tree(root: nn.Module) -> list[dict[str, Any]]:
    """Return the tree as plain data, in order of definition."""
    return [
        {"path": path, "type": type(module).__name__, "parameters": _count(module)} for path, module in modules_of(root)
    ]


def _count(module: nn.Module) -> int:
    own = module.parameters(recurse=False)
    return sum(p.numel() for p in own if not nn.parameter.is_lazy(p))


def _types(module: nn.Module) -> tuple[str, ...]:
    mro = [cls for cls in type(module).__mro__ if issubclass(cls, nn.Module)]
    return tuple(dict.fromkeys(cls.__name__ for cls in mro))


def encoder_layers(root: nn.Module) -> list[tuple[str, nn.TransformerEncoderLayer]]:
    """Return the layers with a fused path in inference, which any hook in or on them would disable."""
    fused = nn.TransformerEncoderLayer
    return [(path, m) for path, m in modules_of(root) if isinstance(m, fused) and type(m).forward is fused.forward]
