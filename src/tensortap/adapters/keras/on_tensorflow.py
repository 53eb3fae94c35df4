"""Keras on TensorFlow: everything that one tap needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf
from keras import tree

from tensortap.adapters.arrays import Taker
from tensortap.adapters.base import Clock, Port, Wanted
from tensortap.adapters.keras.backend import Undo
from tensortap.adapters.keras.gradients import OPTIMIZERS
from tensortap.adapters.keras.graphs import Graphs
from tensortap.adapters.keras.hooks import LayerHook, Ports, RootHook
from tensortap.adapters.keras.layers import Variable
from tensortap.adapters.keras.ops import GraphOps, operations
from tensortap.adapters.keras.sight import Sight
from tensortap.adapters.keras.standins import Around
from tensortap.adapters.keras.steps import KerasSteps
from tensortap.adapters.keras.tensors import in_hand, plain
from tensortap.adapters.keras.training import Training, collect


class OnTensorflow:
    """One tap's view of TensorFlow."""

    def __init__(self, taker: Taker, clock: Clock, limits: Sequence[tuple[str, float]]) -> None:
        self.steps = KerasSteps(taker.recorder, clock)
        self._ops: GraphOps | None = None
        self._sight = Sight(taker, self.steps, Graphs(taker, limits))

    def open(self, always: bool, limited: bool) -> None:
        """Set the gate that graphs ask."""
        self._sight.graphs.open(always, limited)

    def look_inside(self, wanted: Wanted, paths: Sequence[str]) -> bool:
        """See single operations, if the probes ask for any."""
        self._ops = operations(self._sight.taker, self._sight, wanted, paths)
        return self._ops is not None

    def hook(self, ports: Mapping[str, Sequence[Port]], method: Any, path: str, root: bool) -> Around:
        """What goes around a layer's method."""
        inside = [] if self._ops is None else [partial(self._ops.inside, path)]
        kinds = Ports(**{kind: tuple(each) for kind, each in ports.items()})
        return (RootHook if root else LayerHook)(self._sight, kinds, method, *inside)

    def watch(self, model: Any, gradients: Sequence[tuple[Variable, Port]]) -> list[Undo]:
        """See training steps, and what optimizers are given."""
        undo = Training(self._sight).watch(model)
        if gradients:
            ports: dict[int, list[Port]] = {}
            for variable, port in gradients:
                ports.setdefault(id(variable.value), []).append(port)
            watcher = partial(self._given, ports)
            OPTIMIZERS.join(watcher)
            undo.append(partial(OPTIMIZERS.leave, watcher))
        return undo

    def collect(self, step: Any) -> None:
        """Record what graphs have left."""
        collect(self._sight, step)

    def unseen(self) -> dict[str, str]:
        """Patterns for operations that met none."""
        return {} if self._ops is None else self._ops.unseen()

    def in_numpy(self, value: Any) -> Any:
        """Tensors in hand as arrays; what is in a graph has no values to give."""
        return arrays_of(value)

    def _given(self, ports: Mapping[int, Sequence[Port]], gradient: Any, variable: Any) -> None:
        found = ports.get(id(variable))
        if found and gradient is not None:
            self._sight.see(found, [("", plain(gradient))])


def arrays_of(value: Any) -> Any:
    """A nested value with its tensors as arrays; what is in a graph has no values to give, and stays."""
    if not tf.is_tensor(value) and not isinstance(value, (dict, list, tuple)):
        return value
    return tree.map_structure(lambda v: plain(v).numpy() if tf.is_tensor(v) and in_hand(v) else v, value)
