"""The role of each module that a script calls: a model, a part of a model, or neither."""

from __future__ import annotations

import enum
import weakref

from torch import nn


class ModuleRole(enum.IntEnum):
    """The role of a module; a later role replaces an earlier one."""

    OTHER = 0  # not recorded
    PART = 1  # inside a model
    MODEL = 2  # called from outside any model


class KnownModules:
    """The role of every module that was called, for as long as the module lives."""

    def __init__(self) -> None:
        self._roles: dict[int, ModuleRole] = {}
        self._refs: dict[int, weakref.ref[nn.Module]] = {}
        self._models: dict[int, int] = {}  # for each part the id of its model
        self._new_hooks: dict[int, list[int]] = {}

    def role(self, module: nn.Module) -> ModuleRole | None:
        """Return a module's role; None when it was never called."""
        return self._roles.get(id(module))

    def note(self, module: nn.Module, role: ModuleRole) -> None:
        """Give a module a role, unless it has a higher one."""
        key = id(module)
        if self._roles.get(key, ModuleRole.OTHER) == ModuleRole.OTHER:
            self._refs[key] = weakref.ref(module, lambda _: self._forget(key))
        self._roles[key] = max(role, self._roles.get(key, ModuleRole.OTHER))

    def pass_by(self, module: nn.Module) -> list[int]:
        """Mark a module as outside of every model. Return its new pre-hooks: none."""
        self.note(module, ModuleRole.OTHER)
        return []

    def note_model(self, module: nn.Module, new_hooks: list[int]) -> None:
        """Remember a model's parts, and the pre-hooks that it got while it was being called."""
        self._new_hooks[id(module)] = new_hooks
        for child in module.children():
            for part in child.modules():
                self.note(part, ModuleRole.PART)
                self._models[id(part)] = id(module)

    def model_of(self, module: nn.Module) -> int:
        """Return the id of the model that a part belongs to; 0 when it is no part."""
        return self._models.get(id(module), 0)

    def new_hooks(self, module: nn.Module) -> list[int]:
        """Return the pre-hooks that a model got while it was being called."""
        return self._new_hooks.get(id(module), [])

    def _forget(self, key: int) -> None:
        for table in (self._refs, self._roles, self._models, self._new_hooks):
            table.pop(key, None)
