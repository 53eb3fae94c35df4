"""Single operations of a traced step: which of them are wanted, and how they are called."""

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
    """The name scope of one call of a layer, from which its operations are known again."""
    return f"tensortap<{path}@{call}>"


class Operations:
    """The operations that one trace of a step shows. `wants(path, op, number, port)` gives who wants one of them."""

    def __init__(self, wants: Callable[[str, str, int, str], Sequence[int]]) -> None:
        self._wants = wants
        self._numbers: Counter[tuple[str, str, str]] = Counter()

    def of(
        self, equation: Any, scope: str, given: Sequence[Any], gives: Sequence[Any]
    ) -> Iterator[tuple[Any, Mark, str]]:
        """The values of an operation that somebody wants, each with its mark. Backward ones have grad_input."""
        stack = f"{scope}/{equation.source_info.name_stack}"
        path, call = place_of(stack)
        name, backward = equation.primitive.name, _BACKWARD in stack
        key = (f"{path}@{call}", name, str(backward))
        number = self._numbers[key]
        self._numbers[key] += 1
        ports = (("grad_output", given), ("grad_input", gives)) if backward else (("input", given), ("output", gives))
        for port, values in ports:
            for listener in self._wants(path, name, number, port):
                for slot, value in _slots(values):
                    yield value, Mark(listener, f"{path}/{name}#{number}", port, slot), name


def place_of(stack: str) -> tuple[str, str]:
    """The layer that an operation runs in; where none is known, the user's own name scopes."""
    found = _LAYER.findall(stack)
    if found:
        return found[-1][0], found[-1][1]
    words = [word for word in _TRANSFORMS.sub("", stack).split("/") if word]
    return ".".join(words), ""


def _slots(values: Sequence[Any]) -> list[tuple[str, Any]]:
    found = [(f"[{i}]", value) for i, value in enumerate(values) if watchable(value)]
    return [("", found[0][1])] if len(values) == 1 and found else found
