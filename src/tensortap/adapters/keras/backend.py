"""What the adapter needs of the framework that Keras computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tensortap.adapters.base import Port, Wanted
from tensortap.adapters.keras.layers import Variable
from tensortap.adapters.keras.standins import Around
from tensortap.adapters.keras.steps import KerasSteps

Undo = Callable[[], None]


class Backend(Protocol):
    """One tap's view of one backend."""

    steps: KerasSteps

    def open(self, always: bool, limited: bool) -> None:
        """Say what the next run of a compiled function is wanted for: at any rate, or if its loss passes a limit."""

    def look_inside(self, wanted: Wanted, paths: Sequence[str]) -> bool:
        """See single operations, if the probes ask for any: then every layer needs a hook."""

    def hook(self, ports: Mapping[str, Sequence[Port]], method: Any, path: str, root: bool) -> Around:
        """What goes around a layer's method."""

    def watch(self, model: Any, gradients: Sequence[tuple[Variable, Port]]) -> list[Undo]:
        """See training steps and the gradients of weights; what ends it again."""

    def collect(self, step: Any) -> None:
        """Record what compiled functions have left."""

    def unseen(self) -> dict[str, str]:
        """Patterns for operations, each with why none was met; empty for those that met one."""

    def in_numpy(self, value: Any) -> Any:
        """A value with its tensors as arrays."""
