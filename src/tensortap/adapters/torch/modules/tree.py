"""Walk a module tree: which modules and parameters can be tapped, and why others cannot."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import nn

from tensortap.adapters.torch.autograd.members import Owner, member_types
from tensortap.select.ports import BUFFER_PORTS, MODULE_PORTS, PARAMETER_PORTS
from tensortap.select.sites import Candidate

SCRIPTED: Final = "a scripted module takes no hooks; watch the module it was scripted from"
CONTAINER: Final = "is only a container and never called; tap the modules in it"
FLAT: Final = (
    "is flattened into the graph around it, and only its weights are left; torch.export.unflatten() gives it back"
)
BY_WEIGHT: Final = "is used by nn.MultiheadAttention through its weights only and never called"

PARAMETRIZATIONS: Final = "parametrizations"  # what torch.nn.utils.parametrize calls its modules in another
WRAPPED: Final = "_orig_mod"  # the attribute of torch.compile's wrapper

_SCRIPT_MODULE: Final = torch.jit.ScriptModule
_TRACED: Final = torch.jit._trace.TopLevelTracedModule
_NAMED_MODULES: Final = nn.Module.named_modules
NamedModules = list[tuple[str, nn.Module]]


class ModuleTree(NamedTuple):
    """A model and its modules by path. It keeps them alive: hold it only while hooks are placed."""

    root: nn.Module
    named: NamedModules


def walk(root: nn.Module) -> ModuleTree:
    """Return a model's tree. A model may have thousands of modules: walk it once, and pass the tree on."""
    return ModuleTree(root, modules_of(root))


def modules_of(root: nn.Module) -> NamedModules:
    """Return every module under every path it has, the root under the empty one.

    Wrappers made by torch.compile are left out: a compiled model has the paths of the original.
    """
    found: NamedModules = []
    _add_modules(root, "", found)
    return found


def _add_modules(module: nn.Module, path: str, found: NamedModules) -> None:
    """Add what `named_modules(remove_duplicate=False)` yields, whose generators pass each module up level by level."""
    if type(module).named_modules is not _NAMED_MODULES:
        named = module.named_modules(set(), path, False)
        found += [(_unwrapped_path(name), inner) for name, inner in named if not is_wrapper(inner)]
        return
    children = module._modules
    if WRAPPED not in children or not is_wrapper(module):
        found.append((path, module))
    for name, child in children.items():
        if child is not None:
            below = path if name == WRAPPED else f"{path}.{name}" if path else name
            _add_modules(child, below, found)


def _unwrapped_path(path: str) -> str:
    return ".".join(part for part in path.split(".") if part != WRAPPED) if WRAPPED in path else path


def owners_of(named: NamedModules) -> dict[str, Owner]:
    """Return the module and attribute of every parameter and buffer, by each of its names."""
    return {path: Owner(weakref.ref(module), name, ports) for path, module, name, ports in _members_of(named)}


def _members_of(named: NamedModules) -> Iterator[tuple[str, nn.Module, str, tuple[str, ...]]]:
    """Yield the path, the module, the name and the ports of every parameter and buffer."""
    for path, module in named:
        for held, ports in ((module._parameters, PARAMETER_PORTS), (module._buffers, BUFFER_PORTS)):
            for name, value in held.items() if held else ():
                if value is not None:
                    yield f"{path}.{name}" if path else name, module, name, ports


def candidates_of(root: nn.Module) -> list[Candidate]:
    """Return the modules and parameters that can be tapped."""
    named, defaults, types = modules_of(root), DefaultModules(), TypeNames()
    found = [
        candidate(path, module, types, defaults.include(path, module))
        for path, module in named
        if not reason_untappable(module)
    ]
    members = {path: ports for path, _, _, ports in _members_of(named)}
    return found + [Candidate(path, member_types(ports), ports) for path, ports in members.items()]


class TypeNames(dict[type, tuple[str, ...]]):
    """The names of modules' classes and their bases, each looked up once. It keeps the classes alive."""

    def __missing__(self, cls: type) -> tuple[str, ...]:
        bases = [base for base in cls.__mro__ if issubclass(base, nn.Module)]
        names = self[cls] = tuple(dict.fromkeys(base.__name__ for base in bases))
        return names


def candidate(path: str, module: nn.Module, types: TypeNames, default: bool | None = None) -> Candidate:
    """Return a module as patterns see it."""
    inner = module._modules
    leaf = not inner or all(m is None for m in inner.values())
    return Candidate(path, types[type(module)], MODULE_PORTS, leaf, default)


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
        if not module._modules:
            return False
        known = self._known.get(module)
        if known is None:
            self._known[module] = known = any(
                inner is not None
                and name != PARAMETRIZATIONS
                and (not reason_untappable(inner) or self._calls_others(inner))
                for name, inner in module._modules.items()
            )
        return known


def untappable(root: nn.Module) -> dict[str, str]:
    """Return the modules that cannot be tapped, each with the reason."""
    flat = isinstance(root, torch.fx.GraphModule)
    found = {path: why for path, module in modules_of(root) if (why := reason_untappable(module))}
    return {path: FLAT if flat and why == CONTAINER else why for path, why in found.items()}


def reason_untappable(module: nn.Module) -> str:
    """Return why hooks on a module would never run; empty when they would."""
    if isinstance(module, _SCRIPT_MODULE):
        return SCRIPTED if is_scripted(module) else ""
    return CONTAINER if type(module).forward is nn.Module.forward and "forward" not in vars(module) else ""


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
    return isinstance(module, _SCRIPT_MODULE) and not isinstance(module, _TRACED)


def describe_tree(root: nn.Module) -> list[dict[str, Any]]:
    """Return the tree as plain data, in order of definition."""
    return [
        {"path": path, "type": type(module).__name__, "parameters": _count(module)} for path, module in modules_of(root)
    ]


def _count(module: nn.Module) -> int:
    own = module._parameters
    return sum(p.numel() for p in set(own.values()) if p is not None and not nn.parameter.is_lazy(p)) if own else 0


def encoder_layers(named: NamedModules) -> list[tuple[str, nn.TransformerEncoderLayer]]:
    """Return the layers with a fused path in inference, which any hook in or on them would disable."""
    return [(path, module) for path, module in named if is_encoder_layer(module)]


def is_encoder_layer(module: nn.Module) -> TypeGuard[nn.TransformerEncoderLayer]:
    """Return whether a module has a fused path in inference."""
    fused = nn.TransformerEncoderLayer
    return isinstance(module, fused) and type(module).forward is fused.forward
