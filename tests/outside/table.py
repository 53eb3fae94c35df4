"""The results as a page: docs/outside.md."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Results = Sequence[dict[str, Any]]
FAMILIES = {
    "transformers": "architectures of transformers, from shrunken configurations",
    "timm": "timm, one model of each family",
    "torchvision": "torchvision, one model of each family",
    "zoo": "shapes of models as public zoos have them",
    "loop": "training loops as people write them, under `tensortap run`",
}
OPENING = """# Models and loops of others

Models and training loops that this project did not design, held to its promises. Run them yourself; what was
stopped goes on where it was:

```console
make outside
```

For each subject: the same bits with and without taps (outputs, gradients, weights after steps, random state), every
tensor that ran recorded or counted, values right against float64, nothing left behind, a pickle unchanged, and
`tt.verify` true and not empty. A loop must print the same, end the same and leave records. Weights are random.
"""


def summary(results: Results) -> str:
    """One line for each family, and one for all."""
    groups = sorted({r["name"].split("/")[0] for r in results})
    return "\n".join(_line(group, results) for group in [*groups, ""])


def _line(group: str, results: Results) -> str:
    ran, passed, rest = _counted(group, results)
    return f"{group or 'all'}: {passed} of {ran} hold every promise, {rest} do not build"


def _counted(group: str, results: Results) -> tuple[int, int, int]:
    some = [r for r in results if r["name"].startswith(group)]
    ran = [r for r in some if "excluded" not in r]
    return len(ran), sum(not r["failed"] for r in ran), len(some) - len(ran)


def table(results: Results, missing: Sequence[str] = ()) -> str:
    """The page that docs/outside.md shows; `missing` names subjects that were not run."""
    lines = [*_wrapped(OPENING), "## Results", "", *_families(results), ""]
    if missing:
        lines += [f"{len(missing)} subjects were not run: this page was written before the run was over.", ""]
    lines += ["## What does not hold", "", *_failures(results), ""]
    lines += ["## Held with a restriction", "", *_restrictions(results), ""]
    lines += ["## Not built", "", *_wrapped(NOT_BUILT), *_not_built(results)]
    return "\n".join(lines) + "\n"


NOT_BUILT = """These cannot be built or called here without taps either, or take more than four minutes, and are not
counted as subjects: their configuration refuses to be made small, they need a library or compiled operators that are
not here, or no input was found that they take."""


def _families(results: Results) -> Iterator[str]:
    yield "| family | subjects | hold every promise | not built |"
    yield "|---|---|---|---|"
    for group, text in {**FAMILIES, "": "**all**"}.items():
        ran, passed, rest = _counted(group, results)
        yield f"| {text} | {ran} | {passed} ({100 * passed / max(ran, 1):.1f} %) | {rest} |"


def _failures(results: Results) -> Iterator[str]:
    failed = [r for r in results if r.get("failed")]
    if not failed:
        yield "Nothing."
        return
    yield "| subject | promise | what was found |"
    yield "|---|---|---|"
    yield from (
        f"| `{r['name']}` | {promise} | {_cell(text)} |" for r in failed for promise, text in r["failed"].items()
    )


def _restrictions(results: Results) -> Iterator[str]:
    noted: dict[str, list[str]] = {}
    for r in results:
        for promise, text in r.get("notes", {}).items():
            noted.setdefault(f"`{promise}` was not compared: {text}", []).append(r["name"].partition("/")[2])
    if not noted:
        yield "Nothing."
    for text, names in noted.items():
        yield from _wrapped(f"- {text}: {', '.join(names)}", "  ")


def _not_built(results: Results) -> Iterator[str]:
    yield "| subject | reason |"
    yield "|---|---|"
    yield from (f"| `{r['name']}` | {_cell(r['excluded'])} |" for r in results if "excluded" in r)


def _cell(text: str) -> str:
    plain = " ".join(text.replace("|", "\\|").replace("`", "'").split())
    return plain if len(plain) <= 140 else plain[:139] + "…"


def _wrapped(text: str, indent: str = "") -> Iterator[str]:
    """Yield a text in lines of at most 100 characters, paragraph by paragraph, code as it is."""
    import textwrap

    for paragraph in text.strip("\n").split("\n\n"):
        code = paragraph.startswith(("```", "#"))
        yield from paragraph.split("\n") if code else textwrap.wrap(paragraph, 100, subsequent_indent=indent)
        if not indent:
            yield ""
