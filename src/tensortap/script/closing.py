"""The lines that `tensortap run` prints when the script is over."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tensortap import text
from tensortap.text import printable

if TYPE_CHECKING:
    from tensortap.adapters.torch.script.watcher import ScriptWatcher
    from tensortap.script.totals import Totals
    from tensortap.watch import Tap


def say(line: str, **style: Any) -> None:
    """Print a line of ours on stderr, so that the script's own output does not change."""
    click.secho(f"tensortap: {line}", err=True, **style)


def closing_lines(watcher: ScriptWatcher | None, tap: Tap | None, totals: Totals) -> Iterator[str]:
    """Yield what was recorded and what was not; the most important line comes last, where the reader looks."""
    if watcher is None:
        yield f"no model was seen: {_why_no_torch()}"
        return
    yield from _left_out(watcher, tap)
    if tap is None:
        yield "no model was seen: no module with parameters was called" if not watcher.left_out else "nothing was kept"
        return
    if totals.first_bad:
        yield f"NaN or Inf, first at step {totals.first_bad[0]} in {printable(totals.first_bad[1])}"
    yield f"{_models(watcher)}: {_steps(tap, totals)}, {_many(totals.records, 'record')}{_loss(totals)}"
    yield f"look at them: tensortap show {_short(str(tap.path))}"


def _why_no_torch() -> str:
    if "torch" in sys.modules:
        return "the script imported torch, but in a way that tensortap does not notice; import it by `import torch`"
    return "the script did not import torch"


def _left_out(watcher: ScriptWatcher, tap: Tap | None) -> Iterator[str]:
    for name, why in watcher.left_out.items():
        yield f"not watched: {printable(name)}: {why}"
    yield from watcher.models.unmatched.values()
    unseen = {} if tap is None else tap.run.info.get("unseen", {})
    for why, count in Counter(unseen.values()).most_common():
        first = next(site for site, reason in unseen.items() if reason == why)
        yield f"not seen: {printable(first)}{f' and {count - 1} more' if count > 1 else ''} ({why})"
    for name, count in ({} if tap is None else tap.counts).items():
        if name != "unseen":
            yield f"{name.replace('_', ' ')}: {count}"


def _models(watcher: ScriptWatcher) -> str:
    models = watcher.models.members
    if len(models) == 1:
        return models[0].type
    return ", ".join(f"{printable(model.prefix or model.name)} ({model.type})" for model in models)


def _steps(tap: Tap, totals: Totals) -> str:
    phases = [f"{count} {phase}" for phase in ("train", "eval") if (count := totals.steps[phase])]
    which = "" if tap.recorder.probes[0].when.before(1) else f" seen, {tap.recorder.probes[0].when}"
    return _many(sum(totals.steps.values()), "step") + (f" ({', '.join(phases)})" if len(phases) > 1 else "") + which


def _loss(totals: Totals) -> str:
    return "".join(f", {name} {' → '.join(map(text.number, values))}" for name, values in totals.losses.items())


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _short(path: str) -> str:
    near = os.path.relpath(path) if "://" not in path else path
    return path if near.startswith("..") else near
