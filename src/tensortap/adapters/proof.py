"""The proof that tapping changes nothing, the same for every framework: runs with and without, compared, and timed."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensortap.adapters.results import Verification

GRADIENT = "grad "  # what the names of gradients begin with


class Proving(Protocol):
    """What a framework brings to the proof."""

    def observe(self) -> Mapping[str, Any]:
        """Run once from the same state; everything the run leaves, by name."""

    def prepare(self) -> None:
        """Put the state back."""

    def run(self) -> None:
        """Run once, for the time it takes."""

    def traces(self) -> Mapping[str, Any]:
        """Everything a careless tap could leave behind."""

    def same(self, a: Any, b: Any) -> bool:
        """Whether two values are equal bit for bit."""

    def apart(self, a: Any, b: Any) -> Any:
        """By how much two values differ."""


def prove(subject: Proving, model: Any, probes: Sequence[Any], repeats: int, watch: Callable[..., Any]) -> Verification:
    """Run with and without taps, and compare."""
    bare, again, before = subject.observe(), subject.observe(), subject.traces()
    with tempfile.TemporaryDirectory(prefix="tensortap-verify-") as folder:
        with watch(model, *probes, to=f"{folder}/run", strict=True) as tap:
            tapped = subject.observe()
            tap.step()
        left = tuple(_difference(before, subject.traces()))
        records = len(tap.run.table(columns=["step"]))
        unseen = tap.run.info.get("unseen", {})
        nbytes = sum(file.stat().st_size for file in Path(folder).rglob("seg-*.parquet"))
        ratio = _ratio(lambda to: watch(model, *probes, to=to), subject, repeats, folder)
    deterministic = not _unequal(subject, bare, again)
    wrong = _unequal(subject, bare, tapped) if deterministic else []
    outputs = [name for name in wrong if not name.startswith(GRADIENT)]
    return Verification(
        deterministic=deterministic,
        same_outputs=not outputs,
        same_gradients=len(outputs) == len(wrong),
        left_behind=left,
        ratio=ratio,
        bytes_per_step=nbytes,
        records=records,
        unseen=unseen,
        differences=tuple(_describe(subject, name, bare, tapped) for name in wrong),
        has_gradients=any(name.startswith(GRADIENT) for name in bare),
    )


def _ratio(watch: Callable[[str], Any], subject: Proving, repeats: int, folder: str) -> float:
    """Time with taps over time without, measured in turn, each after a run that is not counted."""
    bare, tapped = [], []
    for i in range(repeats):
        _time(subject)
        bare.append(_time(subject))
        with watch(f"{folder}/timed{i}") as tap:
            _time(subject, tap.step)
            tapped.append(_time(subject, tap.step))
    return statistics.median(tapped) / statistics.median(bare)


def _time(subject: Proving, then: Callable[[], None] = lambda: None) -> float:
    subject.prepare()
    start = time.perf_counter()
    subject.run()
    then()
    return time.perf_counter() - start


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            yield name


def _unequal(subject: Proving, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*a, *b])
    return [name for name in names if name not in a or name not in b or not subject.same(a[name], b[name])]


def _describe(subject: Proving, name: str, bare: Mapping[str, Any], tapped: Mapping[str, Any]) -> str:
    if name not in bare or name not in tapped:
        return f"{name}: only {'with' if name in tapped else 'without'} taps"
    return f"{name}: differs by at most {subject.apart(bare[name], tapped[name])}"
