"""Check the sites and steps of a command against a run; errors name values that would work."""

from __future__ import annotations

from collections.abc import Sequence

from tensortap.errors import PatternError, RunError, nearest
from tensortap.select.sites import Pattern
from tensortap.store.filters import places_matching
from tensortap.store.run import Run
from tensortap.text import counted, printable


def check_sites(run: Run, patterns: Sequence[str]) -> list[str] | None:
    """Return the patterns after checking that each matches a site of the run; None when there are none."""
    places = run.places if patterns else []
    for text in patterns:
        pattern = Pattern.parse(text)
        try:
            places_matching([pattern], places)
        except PatternError:
            raise PatternError(_no_such_site(run, text, [*dict.fromkeys(p.site for p in places)])) from None
    return list(patterns) or None


def _no_such_site(run: Run, text: str, paths: list[str]) -> str:
    sites = run.sites
    if not sites:
        return f"{run.path} ({run.state}) holds no records yet"
    near = nearest(text, sites) or nearest(text.partition(":")[0], paths) or sites[:3]
    found = ", ".join(map(printable, near))
    known = f"{len(sites)} sites in {run.path}"
    return f"--site {printable(text)} matches none of the {known}; there is {found}: --site {near[0]!r}"


def resolve_steps(run: Run, step: int | slice | None) -> int | slice | None:
    """Return the steps as numbers of this run: negative ones count from its last. Raises when it has none of them."""
    if step is None:
        return None
    known = run.steps
    if isinstance(step, int):
        wanted: int | slice = _from_end(step, known)
        found = wanted in known
    else:
        wanted = slice(*(None if end is None else _from_end(end, known) for end in (step.start, step.stop)))
        found = any(_within(s, wanted) for s in known)
    if not found:
        raise RunError(_no_such_step(run, step, known))
    return wanted


def _from_end(step: int, known: list[int]) -> int:
    return known[max(step, -len(known))] if step < 0 and known else step


def _within(step: int, wanted: slice) -> bool:
    return (wanted.start is None or step >= wanted.start) and (wanted.stop is None or step < wanted.stop)


def _no_such_step(run: Run, step: int | slice, known: list[int]) -> str:
    if not known:
        return f"{run.path} ({run.state}) holds no records yet"
    ends = [step] if isinstance(step, int) else [step.start, step.stop]
    asked = ":".join("" if end is None else str(end) for end in ends)
    aim = next((end for end in ends if end is not None), 0)
    near = sorted(sorted(known, key=lambda s: abs(s - aim))[:3])
    best = min(near, key=lambda s: abs(s - aim))
    return (
        f"{run.path} has no records at step {asked}; it has {counted(len(known), 'step')} from {known[0]} to "
        f"{known[-1]}, the nearest are {', '.join(map(str, near))}: --step {best}"
    )
