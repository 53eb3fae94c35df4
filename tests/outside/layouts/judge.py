"""Record the trainings, compare them with one process, and tell which answers are right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import tensortap as tt
from outside.layouts.correct import DTYPES, LAYOUTS, MORE, ONE
from outside.layouts.faults import FAULTS, Fault
from outside.layouts.pool import Recording, record_all
from outside.layouts.scored.cases import CORRECT, FP32_ONLY
from outside.layouts.scored.cases import FAULTS as SCORED_FAULTS
from outside.layouts.training import Layout, Setup


class Correct(NamedTuple):
    """A training that must agree with one process."""

    name: str
    layout: Layout
    setup: Setup


class Verdict(NamedTuple):
    """One case, whether the answer is right, and the answer."""

    name: str
    layout: str
    right: bool
    answer: str


def correct_pairs() -> list[Correct]:
    """Every layout in every type, and every option of the faults done right."""
    known = {layout.name: layout for layout in LAYOUTS}
    pairs = [(layout, "", Setup()) for layout in LAYOUTS]
    pairs += [(known[name], f" {option}", setup) for option, setup, names in MORE for name in names]
    return [
        Correct(f"{layout.name}{option} {short}", layout, replace(setup, dtype=dtype))
        for layout, option, setup in pairs
        for short, dtype in DTYPES.items()
    ]


def scored_pairs() -> list[Correct]:
    """The correct trainings of the other models."""
    both = [(*pair, short) for pair in CORRECT for short in DTYPES]
    return [
        Correct(f"scored {layout.name} {option} {short}", layout, replace(setup, dtype=DTYPES[short]))
        for layout, option, setup, short in (*both, *((*pair, "fp32") for pair in FP32_ONLY))
    ]


def reference_name(setup: Setup) -> str:
    """The folder of the one process that a training is compared with."""
    return "one " + "-".join(str(value).removeprefix("torch.") for value in setup.__dict__.values())


def record_cases(cases: Sequence[Correct | Fault], out: Path, keep: Iterable[object] = ()) -> dict[str, str]:
    """Record the cases and their references in one start for each number of ranks."""
    setups = dict.fromkeys(case.setup for case in cases)
    recordings = [Recording(reference_name(setup), ONE, setup) for setup in setups]
    recordings += [
        Recording(case.name, case.layout, case.setup, case.make)
        if isinstance(case, Fault)
        else Recording(case.name, case.layout, case.setup)
        for case in cases
    ]
    return record_all(recordings, out, keep)


def verdicts(cases: Sequence[Correct | Fault], out: Path) -> Iterator[Verdict]:
    """Compare each with its reference."""
    for case in cases:
        judge = _judge_fault if isinstance(case, Fault) else _judge_correct
        yield judge(case, out)  # type: ignore[arg-type]


def _diff(case: Correct | Fault, out: Path) -> Any:
    return tt.diff(out / reference_name(case.setup), out / case.name, mesh=case.layout.mesh)


def _judge_correct(case: Correct, out: Path) -> Verdict:
    found = _diff(case, out)
    alarms = list(tt.open(out / case.name).findings(["replicas_differ", "rank_outlier"]))
    answer = "same" if found else str(found.cause)
    if alarms:
        answer = str(alarms[0])
    return Verdict(case.name, case.layout.name, bool(found) and not alarms, answer)


def _judge_fault(case: Fault, out: Path) -> Verdict:
    if case.by == "replicas":
        return _judge_replicas(case, out)
    cause = _diff(case, out).cause
    if cause is None:
        return Verdict(case.name, case.layout.name, False, "nothing found")
    right = cause.kind in case.kinds and cause.step == case.step
    modules = (case.module,) if isinstance(case.module, str) else case.module
    right &= cause.everywhere or len(cause.sites) > _MANY if modules is None else cause.module in modules
    right &= case.rank is None or cause.rank == case.rank
    return Verdict(case.name, case.layout.name, bool(right), str(cause))


def _judge_replicas(case: Fault, out: Path) -> Verdict:
    found = list(tt.open(out / case.name).findings(["replicas_differ"]))
    if not found:
        return Verdict(case.name, case.layout.name, False, "nothing found")
    first = found[0]
    right = str(first.site).startswith(f"{case.module}.") and first.steps.first == case.step
    return Verdict(case.name, case.layout.name, right and first.evidence.get("rank") == case.rank, str(first))


_MANY = 20
__all__ = [
    "FAULTS",
    "SCORED_FAULTS",
    "Correct",
    "Verdict",
    "correct_pairs",
    "record_cases",
    "scored_pairs",
    "verdicts",
]
