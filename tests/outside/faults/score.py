"""Run the cases, each in a forked process that has PyTorch already, and score what the rules say of them."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # virtual machines that name AMX may not have it

import torch

import tensortap as tt
from outside.faults import healthy, pairs_output, pairs_training, published, strangers
from outside.faults.case import Healthy, Pair, is_scored
from outside.faults.styles import others, plain, sequences
from tensortap.script.options import RunOptions
from tensortap.script.session import ScriptRun

PAIRS = [*pairs_output.PAIRS, *pairs_training.PAIRS]
OUTSIDE = {pair.name for pair in published.PAIRS}
STYLES = [*plain.PAIRS, *sequences.PAIRS, *others.PAIRS]
OF_STYLES = {pair.name for pair in STYLES}
OF_STRANGERS = {pair.name for pair in strangers.PAIRS}
ALL_PAIRS = [*PAIRS, *published.PAIRS, *STYLES, *strangers.PAIRS]
TRAININGS = healthy.TRAININGS
GROUPS = ("tuned", "scored", "outside, tuned", "outside, scored", "styles, tuned", "styles, scored",
          "strangers, tuned", "strangers, scored")  # fmt: skip
PATIENCE = 120  # seconds for one script
# What a script's training or `check` would import: once here, instead of two seconds in every child.
WARM = ("torch._dynamo", "pandas", "pyarrow.dataset", "tensortap.adapters.torch.script.watcher")
FORMS = {"zero-edit": {}, "fuller": {"watch": "everything"}}


@dataclass(frozen=True)
class Result:
    """What was found in one script."""

    name: str
    form: str
    part: str  # fault, correct or healthy
    found: list[dict[str, Any]]
    error: str = ""
    detected: bool = False
    diagnosed: bool = False
    named: bool = False
    located: bool = False
    kind: str = ""
    extra: list[str] = field(default_factory=list)

    @property
    def scored(self) -> bool:
        """Whether nobody tunes rules on it."""
        return is_scored(self.name)

    @property
    def group(self) -> str:
        """The part of the set it belongs to."""
        own = "scored" if self.scored else "tuned"
        sets = {"outside, ": OUTSIDE, "styles, ": OF_STYLES, "strangers, ": OF_STRANGERS}
        return next((group for group, names in sets.items() if self.name in names), "") + own

    @property
    def alarms(self) -> list[str]:
        """The rules that warn."""
        return [f["rule"] for f in self.found if f["severity"] != "info"]

    def line(self) -> str:
        """One line for those who tune."""
        marks = "".join(c if v else "." for c, v in zip(
            "DdnL", (self.detected, self.diagnosed, self.named, self.located), strict=True))  # fmt: skip
        said = "; ".join(f"{f['rule']}@{f['code'] or f['site']}" for f in self.found if f["severity"] != "info")
        return (
            f"{self.form:9} {self.part:8} {marks if self.part == 'fault' else '    '} {self.name}: {said} {self.error}"
        )


def run_all(
    names: tuple[str, ...] = (), forms: Iterable[str] = ("zero-edit",), parts: tuple[bool, ...] = (False, True),
    share: tuple[int, int] = (0, 1),
) -> Iterator[Result]:  # fmt: skip
    """Run what was asked for, one result after the other; no name means everything.

    `parts` are those that are scored only, or not. `share` is (i, n): every nth case, from the ith on.
    """
    torch.set_num_threads(1)
    cases = [
        case
        for case in (*ALL_PAIRS, *TRAININGS)
        if is_scored(case.name) in parts and (not names or case.name.startswith(names))
    ]
    for case in sorted(cases[share[0] :: share[1]], key=_uses_keras):  # so that the others run without Keras
        if _uses_keras(case):
            os.environ.setdefault("KERAS_BACKEND", "torch")  # as these scripts do
            warm_up("keras")
        for form in forms:
            yield from _run_pair(case, form) if isinstance(case, Pair) else [_run_healthy(case, form)]


def warm_up(*modules: str) -> None:
    """Import modules that children would import."""
    for module in modules:
        importlib.import_module(module)


def _uses_keras(case: Pair | Healthy) -> bool:
    return "keras" in case.good


def _run_pair(pair: Pair, form: str) -> Iterator[Result]:
    good, good_error = findings_of(pair.good, form)
    bad, bad_error = findings_of(pair.bad, form)
    yield Result(pair.name, form, "correct", good, good_error, kind=pair.kind)
    usual = {f["rule"] for f in good if f["severity"] != "info"}
    new = [f for f in bad if f["severity"] != "info" and f["rule"] not in usual]
    right = [f for f in new if f["rule"] in (pair.cause, *pair.symptoms)]
    named = [f for f in new if f["rule"] == pair.cause]
    yield Result(
        pair.name, form, "fault", bad, bad_error, bool(new), bool(right), bool(named),
        any(_located(f, pair) for f in right), pair.kind,
    )  # fmt: skip


def _located(finding: dict[str, Any], pair: Pair) -> bool:
    lines = {f"script.py:{n}" for n in pair.lines}
    told = {finding["code"], *finding["codes"]}
    if any(code.endswith(tuple(lines)) for code in told if code):
        return True
    sites = {finding["site"], *finding["places"]}
    return any(_of_module(site, module) for site in sites for module in pair.sites)


def _of_module(site: str, module: str) -> bool:
    path = site.partition(":")[0]
    return site == module or path == module or (bool(module) and path.startswith(f"{module}."))


def _run_healthy(case: Healthy, form: str) -> Result:
    found, error = findings_of(case.good, form)
    return Result(case.name, form, "healthy", found, error)


def findings_of(source: str, form: str) -> tuple[list[dict[str, Any]], str]:
    """Run a script under `tensortap run` in a forked child; return its findings, and what went wrong."""
    warm_up(*WARM)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "script.py").write_text(source)
        said = Path(folder) / "said.json"
        child = os.fork()
        if not child:
            _in_child(Path(folder), form, said)
        _, status = os.waitpid(child, 0)
        if not said.exists():
            return [], f"the child ended with {status}"
        content = json.loads(said.read_text())
        return content["found"], content["error"]


def _in_child(folder: Path, form: str, said: Path) -> None:
    error, found = "", []
    signal.alarm(PATIENCE)
    try:
        os.chdir(folder)
        with Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            run = ScriptRun(RunOptions("script.py", to="run", **FORMS[form]))
            try:
                run.run()
            finally:
                run.finish()
        for finding in tt.open_run("run").findings():
            found.append({
                "rule": finding.rule, "severity": finding.severity, "site": finding.site, "message": finding.message,
                "code": finding.code, "codes": [p for p in finding.places if ".py:" in p],
                "places": list(finding.places),
            })  # fmt: skip
    except BaseException:
        error = traceback.format_exc(limit=-3)
    said.write_text(json.dumps({"found": found, "error": error}))
    sys.stdout.flush()
    os._exit(0)


def table(results: list[Result]) -> str:
    """Return the counts of both parts as Markdown."""
    rows = [
        "| part | form | pairs | detected | diagnosed | cause named | located | false alarms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in GROUPS:
        for form in dict.fromkeys(r.form for r in results):
            mine = [r for r in results if r.form == form and r.group == group]
            faults = [r for r in mine if r.part == "fault"]
            clean = [r for r in mine if r.part != "fault"]
            shares = [f"{sum(getattr(r, k) for r in faults)}" for k in ("detected", "diagnosed", "named", "located")]
            wrong = sum(bool(r.alarms) for r in clean)
            if mine:
                rows.append(f"| {group} | {form} | {len(faults)} | {' | '.join(shares)} | {wrong} of {len(clean)} |")
    broken = [
        f"{r.name} ({r.form}, {r.part}): {r.error.splitlines()[-1] if r.error else ''}" for r in results if r.error
    ]
    return "\n".join([*rows, *(f"could not run: {line}" for line in broken)])
