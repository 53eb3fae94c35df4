"""Run every subject, each in a process of its own, and write the table: `python -m outside [NAME…] [--table FILE]`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from warm_python import TIMED_OUT, WarmPython

from outside.table import summary, table

GROUPS = {"zoo": "zoo", "loop": "loops", "torchvision": "vision", "timm": "vision", "transformers": "language"}
PATIENCE = 240  # seconds for one subject
WARM = ("torch", "torch._dynamo", "transformers", "tensortap.cli.app", "outside.checks", "outside.language",
        "outside.vision")  # fmt: skip


def main() -> int:
    """Run what was asked for; the exit code says whether 99 % held every promise."""
    asked = _parser().parse_args()
    if asked.one:
        warnings.simplefilter("ignore")
        print(json.dumps(_verdict(asked.names[0])))
        return 0
    if asked.list:
        print("\n".join(s.name for s in subjects() if not asked.names or s.name.startswith(tuple(asked.names))))
        return 0
    results, missing = _results(asked)
    if asked.table is not None:
        asked.table.write_text(table(results, missing), encoding="utf-8")
    print(summary(results))
    ran = [r for r in results if "excluded" not in r]
    return 0 if ran and sum(not r["failed"] for r in ran) >= 0.99 * len(ran) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="outside", description=__doc__)
    parser.add_argument("names", nargs="*", help="subjects, or the beginnings of their names")
    parser.add_argument("--table", type=Path, help="write the results as Markdown")
    parser.add_argument("--results", type=Path, help="append every result to this file, and go on where it ends")
    parser.add_argument("--again", choices=("excluded", "failed"), help="with --results: run also what was so before")
    parser.add_argument("--known", action="store_true", help="with --results: run nothing, and report what is there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the names of the subjects")
    return parser


def _results(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the subjects that have no result in the file yet; return the results, and the names without one."""
    path: Path | None = asked.results
    found = {} if path is None or not path.exists() else _read(path)
    known = {name: result for name, result in found.items() if not (asked.again and result.get(asked.again))}
    with WarmPython(*WARM) as python:
        names = python.run(["-m", "outside", "--list", *asked.names], patience=PATIENCE).stdout.split("\n")
        names = [name for name in names if "/" in name]
        for name in () if asked.known else names:
            if name not in known:
                known[name] = _run(python, name)
                _tell(known[name])
                if path is not None:
                    with path.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(known[name]) + "\n")
    return [known[name] for name in names if name in known], [name for name in names if name not in known]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {result["name"]: result for result in results}


def _tell(result: dict[str, Any]) -> None:
    state = "excluded" if "excluded" in result else "FAILED" if result["failed"] else "ok"
    reason = result.get("excluded") or "; ".join(f"{k}: {v}" for k, v in result["failed"].items())
    print(f"{state:8} {result['name']} {reason[:160]}", flush=True)


def subjects() -> Iterator[Any]:
    """Every subject there is."""
    for module in dict.fromkeys(GROUPS.values()):
        yield from importlib.import_module(f"outside.{module}").subjects()


def _run(python: WarmPython, name: str) -> dict[str, Any]:
    begin = time.perf_counter()
    if name.startswith("loop/"):  # starts processes itself
        return {**_verdict(name), "seconds": round(time.perf_counter() - begin, 1)}
    done = python.run(["-m", "outside", "--one", name], patience=PATIENCE)
    if done.returncode == TIMED_OUT:
        return {"name": name, "excluded": f"takes more than {PATIENCE} s here"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().split("\n")[-1])
    except ValueError:
        tail = done.stderr.strip().split("\n")[-1][:200]
        found = {"name": name, "failed": {"crash": f"exit code {done.returncode}: {tail}"}}
    return {**found, "seconds": round(time.perf_counter() - begin, 1)}


def _verdict(name: str) -> dict[str, Any]:
    from outside.checks import check
    from outside.packages import NotBuildableError

    group = importlib.import_module(f"outside.{GROUPS[name.partition('/')[0]]}")
    subject = next(s for s in group.subjects() if s.name == name)
    try:
        verdict = subject.check() if hasattr(subject, "check") else check(subject)
    except NotBuildableError as error:
        return {"name": name, "excluded": str(error)[:200]}
    except Exception as error:
        where = traceback.format_exc().strip().split("\n")[-3].strip()
        return {"name": name, "failed": {"error": f"{type(error).__name__}: {error} ({where})"[:400]}}
    return {"name": name, "failed": dict(verdict.failed), "notes": dict(verdict.notes)}


if __name__ == "__main__":
    sys.exit(main())
