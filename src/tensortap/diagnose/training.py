"""The training context for rules: events, and the parameters and gradients of some steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensortap.reduce.statistics import NUMBERS, REGISTRY
from tensortap.store import queries
from tensortap.store.files import load_json
from tensortap.store.snapshot import Snapshot
from tensortap.types import Place

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_PORTS: Final = {"param": "weight", "grad": "grad"}
_COLUMNS: Final = ("l2", "mean", "std", "min", "max", "zeros")


class TrainingEvent(NamedTuple):
    """What happened in a training besides tensors; `data` is what the event's kind says (docs/run-folder.md)."""

    step: int
    rank: int
    kind: str
    name: str
    code: str
    data: dict[str, Any]


def training_events(snapshot: Snapshot) -> list[TrainingEvent]:
    """Return the events of a run, in order."""
    rows = queries.events(snapshot).to_pylist()
    return [TrainingEvent(r["step"], r["rank"], r["kind"], r["name"], r["code"], _data(r["data"])) for r in rows]


def _data(text: str) -> dict[str, Any]:
    """Return the details of an event; empty if a damaged file holds something else."""
    try:
        data = load_json(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def prefixed_types(models: Sequence[TrainingEvent]) -> dict[str, str]:
    """Return the class of each module by its path, where the sites of several models begin with a model's name."""
    if not models or not all(event.name for event in models):
        return {}
    listed = [module for event in models for module in event.data.get("modules") or () if isinstance(module, dict)]
    roots = {event.name: str(event.data.get("class", "")) for event in models}
    return roots | {m["path"]: str(m.get("type", "")) for m in listed if isinstance(m.get("path"), str)}


def _parameters(event: TrainingEvent, *columns: str) -> Iterator[tuple[Any, ...]]:
    """Yield the entry of each parameter in an event; nothing if the event has an unexpected form."""
    lists = [event.data.get(name) for name in ("names", *columns)]
    if all(isinstance(found, list) and len(found) == len(lists[0] or ()) for found in lists):
        yield from (row for row in zip(*lists, strict=True) if isinstance(row[0], str))


def thin_sites(
    events: Sequence[TrainingEvent], port: str
) -> Iterator[tuple[Place, tuple[int, ...], Integers, dict[str, Floats]]]:
    """Yield place, shape, steps and columns of each parameter or gradient in the events of parameters."""
    rows: dict[str, list[tuple[int, list[int], list[float]]]] = {}
    for event in events if port in _PORTS else ():
        for name, shape, numbers in _parameters(event, "shapes", _PORTS[port]):
            if _are_numbers(numbers, len(_COLUMNS)) and _are_numbers(shape):
                rows.setdefault(name, []).append((event.step, shape, numbers))
    for name, found in rows.items():
        shape = tuple(found[-1][1])
        steps = np.array([row[0] for row in found], np.int64)
        yield Place(name, port, "", ""), shape, steps, _columns(shape, [row[2] for row in found])


def _are_numbers(found: Any, count: int | None = None) -> bool:
    listed = isinstance(found, list) and count in (None, len(found))
    return listed and all(isinstance(number, (int, float)) for number in found)


def _columns(shape: tuple[int, ...], numbers: list[list[float]]) -> dict[str, Floats]:
    numel, count = float(np.prod(shape)), len(numbers)
    columns: dict[str, Floats] = {key: np.zeros(count) for key in NUMBERS}
    columns |= dict(zip(_COLUMNS, np.array(numbers, np.float64).T, strict=True))
    columns["zeros"] = np.round(columns["zeros"] * numel)
    columns["numel"] = np.full(count, numel)
    columns["l1"] = np.abs(columns["mean"]) * numel
    return columns | {s.name: s.derive(columns) for s in REGISTRY if s.derive is not None}


def thin_ratios(events: Sequence[TrainingEvent]) -> dict[Place, tuple[Integers, Floats]]:
    """Return each update relative to its weight."""
    found: dict[Place, dict[int, float]] = {}
    for event in events:
        for name, ratio in _parameters(event, "update"):
            if isinstance(ratio, (int, float)) and ratio >= 0:
                found.setdefault(Place(name, "update", "", ""), {})[event.step] = float(ratio)
    return {
        place: (np.fromiter(steps, np.int64), np.fromiter(steps.values(), np.float64)) for place, steps in found.items()
    }
