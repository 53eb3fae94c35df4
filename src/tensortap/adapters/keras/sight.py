"""What one tap does with tensors: those in hand are recorded, those in a graph are held until it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tensorflow as tf

from tensortap.adapters.arrays import Taker
from tensortap.adapters.base import Port
from tensortap.adapters.keras.graphs import Graphs
from tensortap.adapters.keras.steps import KerasSteps
from tensortap.adapters.keras.tensors import array, in_hand

NO_TENSOR: Final = "had no tensor there"


class Sight:
    """Sees tensors for one tap."""

    def __init__(self, taker: Taker, steps: KerasSteps, graphs: Graphs) -> None:
        self.taker = taker
        self.steps = steps
        self.graphs = graphs

    def wants(self, bits: int) -> bool:
        """Whether anything with these probes is to be seen now: a graph decides when it runs."""
        return bool(bits) and (not tf.executing_eagerly() or bool(self.steps.current().armed & bits))

    def see(self, ports: Sequence[Port], found: Sequence[tuple[str, Any]]) -> None:
        """Record what was found, under every name it has."""
        for port in ports:
            if not found:
                port.note = port.note or NO_TENSOR
            for slot, tensor in found:
                try:
                    self._see(port, slot, tensor)
                except Exception as error:
                    self.taker.recorder.ledger.failed("skipped_tensors", f"observing {port.path}:{port.port}", error)

    def _see(self, port: Port, slot: str, tensor: Any) -> None:
        point = port.points.get(slot) or port.point(slot)
        if not point.probes:
            return
        if not in_hand(tensor):
            self.graphs.hold(point, tensor)
            return
        step = self.steps.current()
        if step.armed & point.probes:
            self.taker.take(point, array(tensor), step)
