"""Find the model whose loss a step computed, in a script with several optimizers (a GAN)."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence

import torch

from tensortap.adapters.torch.script.models import ScriptModel
from tensortap.adapters.torch.script.naming import held_by_variables


class LossOwners:
    """Name the model whose parameters an optimizer has stepped; no name while all optimizers hold one model's."""

    def __init__(self) -> None:
        self._known: set[int] = set()  # optimizers that have stepped
        self._several = False
        self._owner = ""
        self._owners: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()

    def stepped(self, optimizer: torch.optim.Optimizer, models: Sequence[ScriptModel]) -> None:
        """Note that an optimizer has stepped in the open step."""
        if id(optimizer) not in self._known:
            self._known.add(id(optimizer))
            self._several |= len({_owner(each, models) or str(id(each)) for each in _in_use(models)}) > 1
            self._owners.clear()  # new models may have been added
        if self._several:
            if optimizer not in self._owners:
                self._owners[optimizer] = _owner(optimizer, models) or type(optimizer).__name__
            self._owner = self._owners[optimizer]

    def take(self) -> str:
        """Return the owner of the step's loss, and reset."""
        owner, self._owner = self._owner, ""
        return owner


def _in_use(models: Sequence[ScriptModel]) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the models, and those of models that are still to come, if a variable holds them.

    Others may be garbage that is not collected yet: when that happens must not decide about names.
    """
    known = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
    held = held_by_variables(sys._getframe())
    return [each for each in known if id(each) in held or _owner(each, models)]


def _owner(optimizer: torch.optim.Optimizer, models: Sequence[ScriptModel]) -> str:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return "+".join(model.prefix or model.name for model in models if model.owns(held))
