"""Copy elements out of recorded tensors, and call the user's own functions on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensortap.errors import TensortapError
from tensortap.record.counters import Counters
from tensortap.record.open_step import Point
from tensortap.record.pending import HostCopy
from tensortap.record.table import Kept, StepTable, Value
from tensortap.reduce.buffers import array_of, buffer_of, view_of
from tensortap.reduce.reducers import Full, Keeper
from tensortap.select.probes import Probe
from tensortap.types import Buffer

Pick = Callable[[Keeper], "npt.NDArray[Any] | None"]
Call = Callable[[Callable[[Any], Any]], Any]
_SMALL_ARRAY: Final = 4096


class ElementReducers:
    """Apply the reducers and functions of the armed probes to a tensor whose row is written.

    An error in one of them is counted in `reducer_errors` and costs that one alone.
    """

    def __init__(self, probes: Sequence[Probe], counters: Counters) -> None:
        reducers = [(1 << i, p.keepers, p.customs) for i, p in enumerate(probes)]
        self._reducers = [entry for entry in reducers if entry[1] or entry[2]]
        self._counters = counters
        self.probes = sum(bit for bit, _, _ in self._reducers)
        self.whole = sum(bit for bit, keepers, customs in self._reducers if keepers == (Full(),) and not customs)
        self.with_functions = sum(bit for bit, _, customs in self._reducers if customs)

    def keep(self, table: StepTable, row: int, point: Point, armed: int, buffer: Buffer, value: Any) -> None:
        """Keep elements of host memory. The user's functions are called with `value`, or with an array without it."""
        self.keep_by(
            table, row, point, armed,
            lambda keeper: keeper.pick(view_of(buffer), point.text),
            lambda function: function(array_of(buffer) if value is None else value),
        )  # fmt: skip

    def keep_memory(self, table: StepTable, row: int, point: Point, armed: int, memory: npt.NDArray[Any]) -> None:
        """Keep elements of memory that is valid during this call, where no user's function is to be called."""
        tensors = table.tensors
        for bit, keepers, _ in self._reducers:
            if not armed & bit:
                continue
            for keeper in keepers:
                try:
                    picked = keeper.pick(memory, point.text)
                except Exception as error:
                    self._counters.failed("reducer_errors", f"{keeper} at {point.text}", error)
                    continue
                if picked is None:
                    self._counters.add("rows_absent")
                else:
                    tensors.append(Kept(row, keeper.kind, picked, bit))

    def keep_by(self, table: StepTable, row: int, point: Point, armed: int, pick: Pick, call: Call) -> None:
        """Keep elements where the adapter picks them (`pick`) and calls the user's functions (`call`) itself."""
        if row < 0:
            return
        tensors, values = table.tensors, table.values  # of this step, even if the table is reused meanwhile
        for bit, keepers, customs in self._reducers:
            if not armed & bit:
                continue
            for keeper in keepers:
                if (picked := self._picked(pick, keeper, point)) is not None:
                    tensors.append(Kept(row, keeper.kind, picked, bit))
            for custom in customs:
                kept = self._called(call, custom.name, custom.function, point)
                if isinstance(kept, dict):
                    values.extend(Value(row, name, number, bit) for name, number in kept.items())
                else:
                    tensors.append(Kept(row, custom.name, kept, bit))

    def _picked(self, pick: Pick, keeper: Keeper, point: Point) -> npt.NDArray[Any] | None:
        try:
            picked = pick(keeper)
        except Exception as error:
            self._counters.failed("reducer_errors", f"{keeper} at {point.text}", error)
            return None
        if picked is None:
            self._counters.add("rows_absent")
        return picked

    def _called(
        self, call: Call, name: str, function: Callable[[Any], Any], point: Point
    ) -> dict[str, float | HostCopy] | npt.NDArray[Any]:
        try:
            return _named_numbers(name, call(function))
        except Exception as error:
            self._counters.failed("reducer_errors", f"{name}() at {point.text}", error)
            return {}


def _named_numbers(name: str, result: Any) -> dict[str, float | HostCopy] | npt.NDArray[Any]:
    """Return what a user's function gave as named numbers, or as a small array of its own."""
    if result is None:
        return {}
    if isinstance(result, Mapping):
        return {f"{name}.{key}": _number(number) for key, number in result.items()}
    array = result.array if isinstance(result, HostCopy) else array_of(buffer_of(result))
    if array.ndim == 0:
        return {name: _number(result if isinstance(result, HostCopy) else array)}
    if array.size <= _SMALL_ARRAY:
        return array if isinstance(result, HostCopy) else np.array(array, copy=True)
    raise TensortapError(
        f"it returned {array.size} elements; a function keeps a number, a dict of numbers or an array of at "
        f"most {_SMALL_ARRAY}; to keep tensors use full(), rows() or sample()"
    )


def _number(number: Any) -> float | HostCopy:
    return number if isinstance(number, HostCopy) else float(number)
