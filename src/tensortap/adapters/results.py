"""What the quick looks give back: plain values, the same for every framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from tensortap import text
from tensortap.reduce.summary import Summary, describe


class Captured(dict[str, Any]):
    """Tensors by site, as they were during one call. `output` is what the model returned."""

    output: Any = None

    def put(self, place: str, value: Any) -> None:
        """One more, under its place; of a second call under `name#1`."""
        name = place.removesuffix(":output") or place
        again = sum(key == name or key.rpartition("#")[::2] == (name, key.removeprefix(f"{name}#")) for key in self)
        self[f"{name}#{again}" if again else name] = value

    def __str__(self) -> str:
        return "\n".join(f"{name}  {text.shape(value.shape)} {value.dtype}" for name, value in self.items())


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found. True when nothing was changed; printed, it is the proof and the cost."""

    deterministic: bool
    same_outputs: bool
    same_gradients: bool
    left_behind: tuple[str, ...]
    ratio: float
    bytes_per_step: int
    records: int
    unseen: Mapping[str, str] = field(default_factory=dict)
    differences: tuple[str, ...] = field(default=())
    has_gradients: bool = True

    def __bool__(self) -> bool:
        return self.same_outputs and self.same_gradients and not self.left_behind

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.deterministic:
            yield f"outputs    {_verdict(self.same_outputs)}"
            if self.has_gradients:
                yield f"gradients  {_verdict(self.same_gradients)}"
        else:
            yield "outputs    differ from run to run even without taps: this model is not deterministic"
        yield f"left over  {', '.join(self.left_behind) or 'nothing'}"
        size = text.size(self.bytes_per_step)
        yield f"cost       ×{self.ratio:.3f} step time, {self.records} records and {size} a step"
        for why, count in Counter(self.unseen.values()).most_common():
            yield f"not seen   {count} sites: {why}"
        yield from self.differences[:10]


def _verdict(same: bool) -> str:
    return "bit for bit the same with and without taps" if same else "DIFFER with taps"


class TensorSummary(NamedTuple):
    """One tensor that went in: its slot and its statistics."""

    slot: str
    summary: Summary


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a NaN or an infinity was born. Printed, it is the answer."""

    direction: Literal["forward", "backward"]
    site: str
    module: str
    operation: str = ""
    source: str = ""
    call: int = 0
    inputs: tuple[TensorSummary, ...] = ()
    output: Summary | None = None
    why: str = ""

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if self.operation or self.module:
            what = self.operation or f"{self.module}'s {self.direction}"
            yield f"{what} in {self.site or '(root)'} ({self.module or 'no module'}), {self.direction}"
        else:  # nobody could run anything again: the first record that shows it
            yield f"first seen in {self.site or '(root)'}, {self.direction}"
        if self.why:
            yield f"  why     {self.why}"
        if self.source:
            yield f"  line    {self.source}"
        for seen in self.inputs:
            yield f"  given   {seen.slot or 'input'} {describe(seen.summary)}"
        if self.output is not None:
            yield f"  gave    {describe(self.output)}"
