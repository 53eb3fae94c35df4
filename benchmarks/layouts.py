"""Parallel trainings against one process: planted faults that must be named, correct ones that must agree.

    python benchmarks/layouts.py [--out FOLDER] [--only TEXT] [--set planted|scored|third|reports|strangers|all]
                                 [--seed N] [--steps N] [--statistics] [--seconds N]

Records small models in every layout of tests/outside/layouts on 1, 2 and 4 gloo processes, compares each run with one
process by `tt.diff` and the rules on replicas, and prints tables. The scored set has other models and layouts, the
third one PyTorch's and transformers' own, the fourth faults that users of Megatron, torchtitan and others reported, and
the fifth kinds that all of those lack; their answers were written down before the first run. `--seed` and `--steps`
begin all of them with other parameters and go on for longer. With `--statistics` no elements are kept. With `--out`
what is recorded there already is not recorded again, so that `--seconds` can cut a long go into several. Exits with 1
when more than one fault of twenty is not named exactly, or a correct training is called wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from outside.layouts.faults import Fault
from outside.layouts.judge import (
    FAULTS,
    SCORED_FAULTS,
    Correct,
    Verdict,
    correct_pairs,
    record_cases,
    scored_pairs,
    verdicts,
)
from outside.layouts.pool import is_recorded
from outside.layouts.reports.cases import FAULTS as REPORTED
from outside.layouts.reports.cases import correct as reported_pairs
from outside.layouts.strangers.cases import FAULTS as STRANGERS
from outside.layouts.strangers.cases import correct as stranger_pairs
from outside.layouts.third.cases import FAULTS as THIRD_FAULTS
from outside.layouts.third.cases import Case as ThirdCase
from outside.layouts.third.cases import correct as third_pairs
from outside.layouts.third.judge import Outcome, outcomes, record_all

import tensortap as tt

NAMED = 0.95
AT_ONCE = 16
Case = Correct | Fault
SETS: dict[str, list[Case]] = {
    "planted": [*FAULTS, *correct_pairs()],
    "scored": [*SCORED_FAULTS, *scored_pairs()],
}

SCENES: dict[str, list[ThirdCase]] = {
    "third": [*THIRD_FAULTS, *third_pairs()],
    "reports": [*REPORTED, *reported_pairs()],
    "strangers": [*STRANGERS, *stranger_pairs()],
}


def record(cases: Sequence[Case], out: Path, keep: list[object], until: float) -> dict[str, str]:
    """Record some at a time, so that a go can be cut short; return what went wrong."""
    errors: dict[str, str] = {}
    for start in range(0, len(cases), AT_ONCE):
        if time.monotonic() < until:
            errors |= record_cases(cases[start : start + AT_ONCE], out, keep)
    return errors


def record_scenes(name: str, out: Path, options: argparse.Namespace, keep: list[object], until: float) -> bool:
    """Record and judge the third set, or the one of reports; return whether its target is reached."""
    cases: list[ThirdCase] = [
        case._replace(scene=replace(case.scene, seed=options.seed, steps=options.steps))
        for case in SCENES[name]
        if options.only in case.name
    ]
    errors: dict[str, str] = {}
    for start in range(0, len(cases), AT_ONCE):
        if time.monotonic() < until:
            errors |= record_all(cases[start : start + AT_ONCE], out, keep)
    done = [case for case in cases if (out / f"{case.name}.done").exists()]
    report(name, errors, len(cases) - len(done), len(cases))
    faults = list(outcomes([case for case in done if case.answer is not None], out))
    correct = list(outcomes([case for case in done if case.answer is None], out))
    return print_tables(name, faults, correct) and not errors and len(done) == len(cases)


def report(name: str, errors: dict[str, str], left: int, total: int) -> None:
    """Say what did not run, and how many are not recorded yet."""
    for case, error in errors.items():
        print(f"{case} did not run:\n{error}", file=sys.stderr)
    if left:
        print(f"{name}: {left} of {total} are not recorded yet", file=sys.stderr)


def table(title: str, found: Sequence[Verdict | Outcome]) -> None:
    """Print the verdicts."""
    width = max((len(verdict.name) for verdict in found), default=0)
    print(f"\n{title}: {sum(verdict.right for verdict in found)} of {len(found)} right")
    for verdict in found:
        print(f"  {'ok ' if verdict.right else 'BAD'}  {verdict.name:<{width}}  {verdict.layout:<22} {verdict.answer}")


def judge(name: str, cases: Sequence[Case], out: Path) -> bool:
    """Print the tables of a set; return whether its target is reached."""
    faults = list(verdicts([case for case in cases if isinstance(case, Fault)], out))
    correct = list(verdicts([case for case in cases if not isinstance(case, Fault)], out))
    return print_tables(name, faults, correct)


def print_tables(name: str, faults: Sequence[Verdict | Outcome], correct: Sequence[Verdict | Outcome]) -> bool:
    """Print both tables of a set; return whether its target is reached."""
    table(f"{name} faults, named exactly", faults)
    table(f"{name} correct trainings, no alarm", correct)
    return sum(verdict.right for verdict in faults) >= NAMED * len(faults) and all(v.right for v in correct)


def main() -> int:
    """Record, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--set", choices=[*SETS, *SCENES, "all"], default="all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--statistics", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    until, good = time.monotonic() + options.seconds, True
    keep: list[object] = [tt.stats()] if options.statistics else []
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        for name, known in SETS.items():
            if options.set not in (name, "all"):
                continue
            chosen = (case for case in known if options.only in case.name)
            cases = [
                case._replace(setup=replace(case.setup, seed=options.seed, steps=options.steps)) for case in chosen
            ]
            errors = record(cases, out, keep, until)
            done = [case for case in cases if is_recorded(case.name, out)]
            report(name, errors, len(cases) - len(done), len(cases))
            good &= judge(name, done, out) and not errors and len(done) == len(cases)
        for name in SCENES:
            if options.set in (name, "all"):
                good &= record_scenes(name, out, options, keep, until)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
