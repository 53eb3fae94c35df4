"""Single operations of a traced step: which of them are wanted, and their names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from tensortap.adapters.jax.tag import Mark, watchable

GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "matmul": frozenset(("dot_general", "ragged_dot_general")),
    "conv": frozenset(("conv_general_dilated",)),
}
_LAYER: Final = re.compile(r"tensortap<(.*?)@(\d+)>")
_TRANSFORMS: Final = re.compile(r"\w+\(|\)")
_BACKWARD: Final = "transpose("


def layer_scope(path: str, call: int) -> str:
    """Return the name scope of one call of a layer, by which its operations are recognised."""
    return f"tensortap<{path}@{call}>"


class JaxOperations:
    """The operations of one traced step. `wants(path, op, number, port)` returns the taps that want one, by number."""

    def __init__(self, wants: Callable[[str, str, int, str], Sequence[int]]) -> None:
        self._wants = wants
        self._numbers: Counter[tuple[str, str, str]] = Counter()

    def of(
        self, equation: Any, scope: str, given: Sequence[Any], gives: Sequence[Any]
    ) -> Iterator[tuple[Any, Mark, str]]:
        """Return the wanted values of an operation, each with its mark. Backward operations have the gradient ports."""
        stack = f"{scope}/{equation.source_info.name_stack}"
        path, call = place_of(stack)
        name, backward = equation.primitive.name, _BACKWARD in stack
        key = (f"{path}@{call}", name, str(backward))
        number = self._numbers[key]
        self._numbers[key] += 1
        ports = (("grad_output", given), ("grad_input", gives)) if backward else (("input", given), ("output", gives))
        for port, values in ports:
            for tap in self._wants(path, name, number, port):
                for slot, value in _slots(values):
                    yield value, Mark(tap, f"{path}/{name}#{number}", port, slot), name


def place_of(stack: str) -> tuple[str, str]:
    """Return the layer that an operation runs in, or the user's own name scopes."""
    found = _LAYER.findall(stack)
    if found:
        return found[-1][0], found[-1][1]
    scopes = [scope for scope in _TRANSFORMS.sub("", stack).split("/") if scope]
    return ".".join(scopes), ""


def _slots(values: Sequence[Any]) -> list[tuple[str, Any]]:
    found = [(f"[{i}]", value) for i, value in enumerate(values) if watchable(value)]
    return [("", found[0][1])] if len(values) == 1 and found else found
