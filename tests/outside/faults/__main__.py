"""Run every case and print how many faults were detected, diagnosed, named and located: `python -m outside.faults`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from outside.faults.score import run_all, table


def main() -> int:
    """Print the table; the exit code says whether every case could be run."""
    parser = argparse.ArgumentParser(prog="outside.faults", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases, or the beginnings of their names")
    parser.add_argument("--form", choices=("zero-edit", "fuller", "both"), default="both")
    parser.add_argument("--show", action="store_true", help="print each case that is tuned on, and what was found")
    parser.add_argument("--part", choices=("tuned", "scored", "both"), default="both")
    parser.add_argument("--results", type=Path, help="a file that every result is added to, as a line of JSON")
    parser.add_argument("--share", default="0/1", help="i/n: every nth case, from the ith on")
    asked = parser.parse_args()
    forms = ("zero-edit", "fuller") if asked.form == "both" else (asked.form,)
    parts = {"tuned": (False,), "scored": (True,), "both": (False, True)}[asked.part]
    i, _, n = asked.share.partition("/")
    results = []
    for result in run_all(tuple(asked.names), forms, parts, (int(i), int(n))):
        results.append(result)
        if asked.results is not None:
            with asked.results.open("a") as file:
                file.write(json.dumps(dataclasses.asdict(result)) + "\n")
    if asked.show:
        for result in results:
            if not result.scored:  # the others are only counted
                print(result.line())
    print(table(results))
    return int(any(result.error for result in results))


if __name__ == "__main__":
    sys.exit(main())
