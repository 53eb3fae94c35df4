"""What one tap needs from the framework that Keras computes with. The base class is complete for eager frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tensortap.adapters.keras.context.recorder import KerasContext
from tensortap.adapters.keras.hooks import KerasLayerHook, KerasRootHook, LayerPorts
from tensortap.adapters.keras.layers import KerasVariable
from tensortap.adapters.keras.observer import KerasObserver
from tensortap.adapters.keras.optimizers import OPTIMIZER_HOOKS
from tensortap.adapters.keras.training import TrainingTaps
from tensortap.adapters.keras.wrappers import CallHook
from tensortap.adapters.plan import Plan, Port

Undo = Callable[[], None]


class KerasBackend:
    """One tap's side of one backend."""

    def __init__(self, observer: KerasObserver) -> None:
        self.observer = observer
        self.steps = observer.steps
        self.context: KerasContext | None = None  # where the training context is recorded

    def arm(self, always: bool, limited: bool) -> None:
        """Set which probes want the next run of compiled functions: in any case, or if its loss passes a limit."""

    def prepare(self, model: Any) -> list[Undo]:
        """Act before the first hook is registered; return the functions to call after the last one is removed."""
        return []

    def observe_operations(self, plan: Plan, paths: Sequence[str]) -> bool:
        """Observe single operations if a probe wants any; return whether every layer then needs a hook."""
        return False

    def layer_hook(self, ports: Mapping[str, Sequence[Port]], method: Any, path: str, root: bool) -> CallHook:
        """Return the hook that wraps a layer's method."""
        kinds = LayerPorts(**{kind: tuple(each) for kind, each in ports.items()})
        return (KerasRootHook if root else KerasLayerHook)(self.observer, kinds, method)

    def attach_training(self, model: Any, gradients: Sequence[tuple[KerasVariable, Port]]) -> list[Undo]:
        """Observe training steps and the gradients that optimizers receive; return the functions that end it."""
        undo = TrainingTaps(self.observer, self.context).attach(model)
        if gradients:
            ports: dict[int, list[Port]] = {}
            for variable, port in gradients:
                ports.setdefault(id(variable.value), []).append(port)
            hook = partial(self._observe_gradient, ports)
            OPTIMIZER_HOOKS.add(hook)
            undo.append(partial(OPTIMIZER_HOOKS.remove, hook))
        return undo

    def collect(self, step: Any) -> None:
        """Record the values that compiled functions have written."""
        self.observer.collect(step)

    def close(self) -> None:
        """Release what is held, after the taps are off."""

    def unseen(self) -> dict[str, str]:
        """Return the patterns for operations, each with the reason if it matched none, else an empty text."""
        return {}

    def _observe_gradient(self, ports: Mapping[int, Sequence[Port]], gradient: Any, variable: Any) -> None:
        found = ports.get(id(variable))
        if found and gradient is not None:
            self.observer.observe(found, [("", self.observer.dense(gradient))])
