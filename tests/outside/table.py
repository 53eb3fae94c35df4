"""The results as a page: docs/outside.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any


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
