"""Parallel trainings against one process: planted faults that must be named, correct ones that must agree.

    python benchmarks/layouts.py [--out FOLDER] [--only TEXT] [--statistics]

Records a small transformer in every layout of tests/outside/layouts on 1, 2 and 4 gloo processes, compares each run
with one process by `tt.diff` and the rules on replicas, and prints a table. With `--statistics` no elements are kept.
Exits with 1 when more than one fault of twenty is not named exactly, or a correct training is called wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from outside.layouts.faults import Fault
from outside.layouts.judge import FAULTS, Verdict, correct_pairs, record_cases, verdicts

import tensortap as tt

NAMED = 0.95


def table(title: str, found: list[Verdict]) -> None:
    """Print the verdicts."""
    width = max((len(verdict.name) for verdict in found), default=0)
    print(f"\n{title}: {sum(verdict.right for verdict in found)} of {len(found)} right")
    for verdict in found:
        print(f"  {'ok ' if verdict.right else 'BAD'}  {verdict.name:<{width}}  {verdict.layout:<22} {verdict.answer}")


def main() -> int:
    """Record, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--statistics", action="store_true")
    options = parser.parse_args()
    cases = [case for case in (*FAULTS, *correct_pairs()) if options.only in case.name]
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        errors = record_cases(cases, out, [tt.stats()] if options.statistics else ())
        for name, error in errors.items():
            print(f"{name} did not run:\n{error}", file=sys.stderr)
        faults = list(verdicts([case for case in cases if isinstance(case, Fault)], out))
        correct = list(verdicts([case for case in cases if not isinstance(case, Fault)], out))
    table("planted faults, named exactly", faults)
    table("correct trainings, no alarm", correct)
    enough = sum(verdict.right for verdict in faults) >= NAMED * len(faults)
    return 0 if enough and all(verdict.right for verdict in correct) and not errors else 1


if __name__ == "__main__":
    sys.exit(main())
