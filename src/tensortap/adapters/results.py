"""The results of the quick looks: plain values, the same for every framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy.typing as npt

from tensortap import text
from tensortap.reduce.summary import Summary, describe
from tensortap.select.patterns import Pattern


class Captured(dict[str, Any]):
    """Copies of tensors by site, made during one call. `output` is the model's return value."""

    output: Any = None

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()

    def put(self, place: str, value: Any) -> None:
        """Add a tensor under its place; one of a second call under `name#1`."""
        name = place.removesuffix(":output") or place
        again = self._calls[name]
        self._calls[name] += 1
        self[f"{name}#{again}" if again else name] = value

    def __str__(self) -> str:
        return "\n".join(f"{name}  {_shape(value)} {value.dtype}" for name, value in self.items())


def full_site_name(name: str) -> str:
    """Return a name of `Captured` with its port.

    >>> full_site_name("blocks.0"), full_site_name("blocks.0#1"), full_site_name("fc:input")
    ('blocks.0:output', 'blocks.0:output#1', 'fc:input')
    """
    head, mark, call = name.rpartition("#")
    again = bool(mark) and call.isdigit()
    site = Pattern.parse(head if again else name)
    port = "" if site.text != site.head else ":output"
    return f"{site.text}{port}{mark + call if again else ''}"


def _shape(value: Any) -> str:
    """Return the shape as people read it; a nested tensor has one for each of its tensors."""
    if getattr(value, "is_nested", False):
        return f"nested, {value.size(0)} tensors"
    return text.shape(value.shape)


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`. True if something was compared and nothing was changed; print it for the details and the
    cost.
    """

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
    has_outputs: bool = True
    unrestored: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        compared = self.has_outputs or self.has_gradients
        return compared and self.same_outputs and self.same_gradients and not self.left_behind

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.has_outputs:
            yield f"outputs    {_NOTHING}"
        if not self.deterministic and self.unrestored:
            yield f"outputs    {_STATE.format(', '.join(self.unrestored[:5]))}"
        elif not self.deterministic:
            yield "outputs    differ from run to run even without taps: this model is not deterministic"
        else:
            if self.has_outputs or not self.same_outputs:
                yield f"outputs    {_verdict(self.same_outputs)}"
            if self.has_gradients:
                yield f"gradients  {_verdict(self.same_gradients)}"
        yield f"left over  {', '.join(self.left_behind) or 'nothing'}"
        size = text.size(self.bytes_per_step)
        yield f"cost       ×{self.ratio:.3f} step time, {self.records} records and {size} a step"
        for why, count in Counter(self.unseen.values()).most_common():
            yield f"not seen   {count} sites: {why}"
        yield from self.differences[:10]


_NOTHING: Final = (
    "nothing to compare: no tensor was found in what the model returned. Give verify a function that runs a step and "
    "returns tensors"
)
_STATE: Final = (
    "differ from run to run because the model keeps state in {}, which cannot be put back: give verify a function that "
    "begins from the same state"
)


def _verdict(same: bool) -> str:
    return "bit for bit the same with and without taps" if same else "DIFFER with taps"


class ModelIdentity(NamedTuple):
    """What tells one model from another: its arrays by name, and the classes and settings of its layers.

    Models with the same weights may differ in their layers: in an activation function, say.
    """

    arrays: Mapping[str, npt.NDArray[Any]]
    layers: str = ""


class TensorSummary(NamedTuple):
    """One input tensor: its slot and its statistics."""

    slot: str
    summary: Summary


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a NaN or an infinity. Print it to read where it was made."""

    direction: Literal["forward", "backward"]
    site: str
    module: str
    operation: str = ""
    source: str = ""
    call: int = 0
    inputs: tuple[TensorSummary, ...] = ()
    output: Summary | None = None
    why: str = ""
    hint: str = ""  # the call that tells more

    def __str__(self) -> str:
        return "\n".join(self._lines())

    @classmethod
    def in_batch(cls, inputs: Iterable[TensorSummary]) -> Origin:
        """Return the origin of a value that no layer made: inputs of the model that are not finite."""
        return cls("forward", "", "", inputs=tuple(inputs), why="the batch was not finite when it came in")

    def _lines(self) -> Iterator[str]:
        if self.operation or self.module:
            what = self.operation or f"{self.module}'s {self.direction}"
            yield f"{what} in {self.site or '(root)'} ({self.module or 'no module'}), {self.direction}"
        else:  # nothing could be run again: this is the first record that shows it
            yield f"first seen in {self.site or '(root)'}, {self.direction}"
        if self.why:
            yield f"  why     {self.why}"
        if self.source:
            yield f"  line    {self.source}"
        for seen in self.inputs:
            yield f"  given   {seen.slot or 'input'} {describe(seen.summary)}"
        if self.output is not None:
            yield f"  gave    {describe(self.output)}"
        if self.hint:
            yield f"  next    {self.hint}"
