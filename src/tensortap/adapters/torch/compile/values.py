"""Values that the user names in code that torch.compile compiles, where no model is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from tensortap.adapters.torch.compile import operators as compiled
from tensortap.adapters.torch.compile.operators import Regions, Target, is_exporting


class CompiledValues(Target):
    """Gives named values on to `see` when the compiled code runs."""

    __slots__ = ("give",)

    def __init__(self, give: Callable[[Any, str], None]) -> None:
        super().__init__(Regions())
        self.give = give

    def __call__(self, value: Any, name: str) -> bool:
        """Whether it is being compiled: then an operation in the graph sees it."""
        if not is_compiling():
            return False
        if isinstance(value, Tensor) and not is_exporting():
            compiled.see(self.site, [(name, value)])
        return True

    def see(self, tensor: Tensor, slot: str) -> None:
        """The graph runs."""
        self.give(tensor.detach(), slot)
