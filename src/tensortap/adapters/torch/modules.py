"""What a module tree offers: which places can be tapped, and which cannot, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn

from tensortap.sites import Candidate

MODULE_PORTS: Final = ("output", "input", "grad_output", "grad_input")
PARAMETER_PORTS: Final = ("param", "grad", "update")
SCRIPTED: Final = "a scripted module takes no hooks; watch the module it was scripted from"


def modules_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module under every name it has, the root under the empty one."""
    return root.named_modules(remove_duplicate=False)


def parameters_of(root: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter under every name it has."""
    return dict(root.named_parameters(remove_duplicate=False))


def candidates_of(root: nn.Module) -> list[Candidate]:
    """What can be tapped."""
    found = [
        Candidate(path, _types(module), MODULE_PORTS, leaf=not any(True for _ in module.children()))
        for path, module in modules_of(root)
        if not is_scripted(module)
    ]
    return found + [Candidate(name, ("Parameter",), PARAMETER_PORTS) for name in parameters_of(root)]


def untappable(root: nn.Module) -> dict[str, str]:
    """What cannot be tapped, each with the reason."""
    return {path: SCRIPTED for path, module in modules_of(root) if is_scripted(module)}


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript owns the module (a traced root is the exception: it takes hooks)."""
    return isinstance(module, torch.jit.ScriptModule) and not isinstance(module, torch.jit.TopLevelTracedModule)


def tree_of(root: nn.Module) -> list[dict[str, Any]]:
    """The tree as plain data, in order of definition."""
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
    """The layers that have a fused path in inference, which any hook in or on them would switch off."""
    return [(path, m) for path, m in modules_of(root) if isinstance(m, nn.TransformerEncoderLayer)]
