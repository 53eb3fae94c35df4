"""Run a model with and without taps from one state, compare bit for bit, and measure the cost."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensortap.adapters.results import Verification
from tensortap.adapters.verification import GRADIENT, OUTPUT, VerificationSubject
from tensortap.watch import Tap

OpenTap = Callable[[str, bool], Tap]  # where to write, and whether an error of ours raises


def run_verification(subject: VerificationSubject, open_tap: OpenTap, repeats: int) -> Verification:
    """Run with and without taps, and compare."""
    bare, again, before = subject.observe(), subject.observe(), subject.traces()
    with tempfile.TemporaryDirectory(prefix="tensortap-verify-") as folder:
        with open_tap(f"{folder}/run", True) as tap:
            tapped = subject.observe()
            tap.step()
        left = tuple(_difference(before, subject.traces()))
        records = len(tap.run.table(columns=["step"]))
        unseen = tap.run.info.get("unseen", {})
        nbytes = sum(file.stat().st_size for file in Path(folder).rglob("seg-*.parquet"))
        ratio = _ratio(open_tap, subject, repeats, folder)
    deterministic = not _unequal(subject, bare, again)
    wrong = _unequal(subject, bare, tapped) if deterministic else []
    unrestored = () if deterministic else tuple(subject.unrestored())
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
        has_outputs=any(name.startswith(OUTPUT) for name in bare),
        has_gradients=any(name.startswith(GRADIENT) for name in bare),
        unrestored=unrestored,
    )


def _ratio(open_tap: OpenTap, subject: VerificationSubject, repeats: int, folder: str) -> float:
    """Time with taps over time without, measured in turn, each after a run that is not counted."""
    bare, tapped = [], []
    for i in range(repeats):
        _time(subject)
        bare.append(_time(subject))
        with open_tap(f"{folder}/timed{i}", False) as tap:
            _time(subject, tap.step)
            tapped.append(_time(subject, tap.step))
    return statistics.median(tapped) / statistics.median(bare)


def _time(subject: VerificationSubject, then: Callable[[], None] = lambda: None) -> float:
    subject.prepare()
    start = time.perf_counter()
    subject.run()
    then()
    return time.perf_counter() - start


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            yield name


def _unequal(subject: VerificationSubject, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*a, *b])
    return [name for name in names if name not in a or name not in b or not subject.same(a[name], b[name])]


def _describe(subject: VerificationSubject, name: str, bare: Mapping[str, Any], tapped: Mapping[str, Any]) -> str:
    if name not in bare or name not in tapped:
        return f"{name}: only {'with' if name in tapped else 'without'} taps"
    return f"{name}: differs by at most {subject.apart(bare[name], tapped[name])}"
