"""Run every subject, each in a process of its own, and write the table: `python -m outside [NAME…] [--table FILE]`."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

GROUPS = {"zoo": "zoo", "loop": "loops", "torchvision": "vision", "timm": "vision", "transformers": "language"}
PATIENCE = 240  # seconds for one subject
AT_ONCE = 2


def main() -> int:
    """Run what was asked for; the exit code says whether 99 % held every promise."""
    parser = argparse.ArgumentParser(prog="outside", description=__doc__)
    parser.add_argument("names", nargs="*", help="subjects, or the beginnings of their names")
    parser.add_argument("--table", type=Path, help="write the results as Markdown")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help="print the names of the subjects")
    asked = parser.parse_args()
    if asked.one:
        return _one(asked.names[0])
    names = [name for name in _names() if not asked.names or name.startswith(tuple(asked.names))]
    if asked.list:
        print("\n".join(names))
        return 0
    results = list(_all(names))
    if asked.table is not None:
        asked.table.write_text(table(results), encoding="utf-8")
    print(summary(results))
    ran = [r for r in results if "excluded" not in r]
    return 0 if ran and sum(not r["failed"] for r in ran) >= 0.99 * len(ran) else 1


def _names() -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from outside.__main__ import subjects; print('\\n'.join(s.name for s in subjects()))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [line for line in done.stdout.split("\n") if "/" in line]


def subjects() -> Iterator[Any]:
    """Every subject there is."""
    for module in dict.fromkeys(GROUPS.values()):
        yield from importlib.import_module(f"outside.{module}").subjects()


def _all(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for result in pool.map(_in_a_process, names):
            state = "excluded" if "excluded" in result else "FAILED" if result["failed"] else "ok"
            reason = result.get("excluded") or "; ".join(f"{k}: {v}" for k, v in result["failed"].items())
            print(f"{state:8} {result['name']} {reason[:160]}", flush=True)
            yield result


def _in_a_process(name: str) -> dict[str, Any]:
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "outside", "--one", name], capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return {"name": name, "excluded": f"takes more than {PATIENCE} s here"}
    last = done.stdout.strip().split("\n")[-1]
    try:
        found: dict[str, Any] = json.loads(last)
    except ValueError:
        tail = done.stderr.strip().split("\n")[-1][:200]
        found = {"name": name, "failed": {"crash": f"exit code {done.returncode}: {tail}"}}
    return {**found, "seconds": round(time.perf_counter() - begin, 1)}


def _one(name: str) -> int:
    from outside.checks import check
    from outside.packages import NotBuildableError

    warnings.simplefilter("ignore")
    group = importlib.import_module(f"outside.{GROUPS[name.partition('/')[0]]}")
    subject = next(s for s in group.subjects() if s.name == name)
    try:
        verdict = subject.check() if hasattr(subject, "check") else check(subject)
        print(json.dumps({"name": name, "failed": dict(verdict.failed), "notes": dict(verdict.notes)}))
    except NotBuildableError as error:
        print(json.dumps({"name": name, "excluded": str(error)[:200]}))
    except Exception as error:
        trace = traceback.format_exc().strip().split("\n")
        print(
            json.dumps(
                {"name": name, "failed": {"error": f"{type(error).__name__}: {error} ({trace[-3].strip()})"[:400]}}
            )
        )
    return 0


def summary(results: Sequence[dict[str, Any]]) -> str:
    """One line for each group, and one for all."""
    lines = []
    groups = sorted({r["name"].split("/")[0] for r in results})
    for group in [*groups, ""]:
        some = [r for r in results if r["name"].startswith(group)]
        ran = [r for r in some if "excluded" not in r]
        passed = sum(not r["failed"] for r in ran)
        lines.append(f"{group or 'all'}: {passed} of {len(ran)} hold every promise, {len(some) - len(ran)} excluded")
    return "\n".join(lines)


def table(results: Sequence[dict[str, Any]]) -> str:
    """The page that docs/outside.md shows."""
    rows = ["| group | subjects | hold every promise | excluded |", "|---|---|---|---|"]
    for line in summary(results).split("\n"):
        group, _, rest = line.partition(": ")
        passed, _, ran, *_ = rest.split(" ")
        rows.append(f"| {group} | {ran} | {passed} | {rest.split(', ')[1].split(' ')[0]} |")
    failed = [r for r in results if r.get("failed")]
    excluded = Counter(_short(r["excluded"]) for r in results if "excluded" in r)
    why = [f"| `{r['name']}` | {p} | {_cell(t)} |" for r in failed for p, t in r["failed"].items()]
    without = [f"| {_cell(reason)} | {count} |" for reason, count in excluded.most_common()]
    return "\n".join([
        "# Outside", "",
        "Models and training loops that this project did not design, held to its promises. Run it yourself:", "",
        "```console", "make outside", "```", "",
        "For each subject: the same bits with and without taps (outputs, gradients, weights after steps,",
        "random state), every tensor that ran recorded or counted, values right against float64, nothing",
        "left behind, a pickle unchanged, `tt.verify` true and not empty.", "",
        *rows, "", "## What does not hold", "",
        *(["| subject | promise | what was found |", "|---|---|---|", *why] if why else ["Nothing."]), "",
        "## Excluded", "", "What cannot be built or called here without taps either.", "",
        *(["| reason | subjects |", "|---|---|", *without] if without else ["Nothing."]), "",
    ])  # fmt: skip


def _short(reason: str) -> str:
    return (
        reason.split("\n", maxsplit=1)[0].split(": ", maxsplit=1)[0] if not reason.startswith("more than") else reason
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:160]


if __name__ == "__main__":
    sys.exit(main())
