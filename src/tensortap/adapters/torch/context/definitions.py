"""Find where a model is defined: the lines that make its modules, set its weights and apply functions in it."""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from typing import Any, Final

from torch import Tensor, nn

from tensortap.adapters.torch.context.caller import TORCH, user_line
from tensortap.adapters.torch.context.sink import EventHub, guarded
from tensortap.context.caller import in_library, shortened_path

INITIALISERS: Final = tuple(name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_"))
_MOST: Final = 20_000  # modules whose lines are remembered
_FUNCTIONS: Final = {
    "softmax": "Softmax", "log_softmax": "LogSoftmax", "sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu",
}  # fmt: skip
_CALLED: Final = re.compile(rf"(?:\b(?:F|torch|functional|th|nn\.functional)\.|\.)({'|'.join(_FUNCTIONS)})_?\(")


class Definitions:
    """Remember lines of the user's code by module and by parameter."""

    def __init__(self, hub: EventHub) -> None:
        self.hub = hub
        self._modules: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._initialised: dict[tuple[int, int], tuple[str, str]] = {}  # function and line, by address and size

    @guarded
    def module_made(self, module: nn.Module) -> None:
        """Remember the line that makes a module."""
        if len(self._modules) < _MOST:
            self._modules[id(module)] = (weakref.ref(module), user_line(3))

    @guarded
    def initialised(self, function: str, tensor: Any) -> None:
        """Remember the line that sets a tensor's elements; PyTorch's own modules are ignored."""
        if isinstance(tensor, Tensor) and len(self._initialised) < _MOST and not _is_ours(sys._getframe(3)):
            self._initialised[tensor.data_ptr(), tensor.numel()] = (function, user_line(3))

    def line_of(self, module: nn.Module) -> str:
        """Return the line that makes a module; empty where it is unknown, or the module's class is the user's own."""
        known = self._modules.get(id(module))
        own = not in_library(getattr(sys.modules.get(type(module).__module__), "__file__", None) or "")
        return known[1] if known is not None and known[0]() is module and not own else ""

    def of_parameters(self, root: nn.Module) -> dict[str, str]:
        """Return the lines that set parameters, or that define them in the user's own modules."""
        found: dict[str, str] = {}
        of_classes = {cls: attribute_lines(cls) for cls in {type(module): None for module in root.modules()}}
        for path, module in root.named_modules():
            lines = of_classes[type(module)]
            for name, parameter in module.named_parameters(recurse=False):
                known = self._initialised.get((parameter.data_ptr(), parameter.numel()))
                line = known[1] if known else lines.get(name, "")
                if line:
                    found[f"{path}.{name}".lstrip(".")] = line
        return found


def functions_in(root: nn.Module) -> dict[str, list[str]]:
    """Return the lines on which the user's own modules apply activations as functions, by the operation's name."""
    found: dict[str, list[str]] = {}
    for cls in {type(module): None for module in root.modules()}:
        for number, line, file in _source(cls):
            for match in _CALLED.finditer(line.partition("#")[0]):
                found.setdefault(_FUNCTIONS[match[1]], []).append(f"{shortened_path(file)}:{number}")
    return {name: lines[:6] for name, lines in found.items()}


def attribute_lines(cls: type) -> dict[str, str]:
    """Return the lines on which a class of the user's own sets its attributes."""
    found: dict[str, str] = {}
    for number, line, file in _source(cls):
        for match in re.finditer(r"\bself\.(\w+)\s*(?:,[^=]*)?=(?!=)", line):
            found.setdefault(match[1], f"{shortened_path(file)}:{number}")
    return found


def _source(cls: type) -> list[tuple[int, str, str]]:
    """Return number, text and file of each line of a class; nothing for a library's class."""
    try:
        file = inspect.getsourcefile(cls) or ""
        if not file or in_library(file):
            return []
        lines, first = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return []
    return [(first + i, line, file) for i, line in enumerate(lines)]


def _is_ours(frame: Any) -> bool:
    return bool(frame.f_code.co_filename.startswith(TORCH))
