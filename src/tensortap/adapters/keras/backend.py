"""What one tap needs of the framework that Keras computes with; this is all of it where tensors always have values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensortap.adapters.keras.hooks import LayerHook, Ports, RootHook
from tensortap.adapters.keras.layers import Variable
from tensortap.adapters.keras.optimizers import OPTIMIZERS
from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.keras.standins import Around
from tensortap.adapters.keras.training import Training
from tensortap.adapters.protocol import Plan, Port

Undo = Callable[[], None]


class Backend:
    """One tap's view of one backend."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight
        self.steps = sight.steps

    def open(self, always: bool, limited: bool) -> None:
        """Say what the next run of a compiled function is wanted for: at any rate, or if its loss passes a limit."""

    def enclose(self, model: Any) -> list[Undo]:
        """Before the first tap is put on, and what follows when the last one is off."""
        return []

    def look_inside(self, plan: Plan, paths: Sequence[str]) -> bool:
        """See single operations, if the probes ask for any: then every layer needs a hook. There are none here."""
        return False

    def hook(self, ports: Mapping[str, Sequence[Port]], method: Any, path: str, root: bool) -> Around:
        """What goes around a layer's method."""
        kinds = Ports(**{kind: tuple(each) for kind, each in ports.items()})
        return (RootHook if root else LayerHook)(self.sight, kinds, method)

    def watch(self, model: Any, gradients: Sequence[tuple[Variable, Port]]) -> list[Undo]:
        """See training steps, and what optimizers are given; what ends it again."""
        undo = Training(self.sight).watch(model)
        if gradients:
            ports: dict[int, list[Port]] = {}
            for variable, port in gradients:
                ports.setdefault(id(variable.value), []).append(port)
            watcher = partial(self._given, ports)
            OPTIMIZERS.join(watcher)
            undo.append(partial(OPTIMIZERS.leave, watcher))
        return undo

    def collect(self, step: Any) -> None:
        """Record what compiled functions have left."""
        self.sight.collect(step)

    def close(self) -> None:
        """The taps are off: let go of what was held."""

    def unseen(self) -> dict[str, str]:
        """Patterns for operations, each with why none was met; empty for those that met one."""
        return {}

    def _given(self, ports: Mapping[int, Sequence[Port]], gradient: Any, variable: Any) -> None:
        found = ports.get(id(variable))
        if found and gradient is not None:
            self.sight.see(found, [("", self.sight.plain(gradient))])
