"""The lines that `tensortap run` prints when the script is over."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from tensortap import text
from tensortap.text import printable

if TYPE_CHECKING:
    from tensortap.script.totals import Totals
    from tensortap.watch import Tap


_WHY_NONE: Final = {
    "keras": "in Keras, fit, evaluate, predict, *_on_batch and models called with values are watched; for a "
    "tf.function write tt.watch(model)",
    "jax": "in JAX, a compiled function is watched if it is called more than once and returns the parameters it is "
    "given, or their gradients; for any other step write step = tt.watch_step(step, model)",
    "torch": "no module with parameters was called",
}


def say(line: str, **style: Any) -> None:
    """Print a line of tensortap on stderr, so that the script's own output does not change."""
    shown = "\n".join(map(printable, line.split("\n")))  # names in it are the script's
    click.secho(f"tensortap: {shown}", err=True, **style)


class Seen(NamedTuple):
    """Facts about a script: its models (class by name), those left out and why, and further runs."""

    models: dict[str, str]
    left_out: dict[str, str]
    unmatched: list[str]
    further: list[str]
    spawned: Mapping[str, int]  # processes that PyTorch started, by start method
    failed: bool = False  # a model was seen, and its run could not be opened


def closing_lines(seen: Seen, tap: Tap | None, totals: Totals) -> Iterator[str]:
    """Yield what was recorded and what was not; the most important line comes last, where the reader looks."""
    yield from _left_out(seen, tap)
    yield from _spawned(seen.spawned)
    if tap is None and seen.spawned:
        return
    if tap is None:
        yield f"no model was seen: {_why_none()}" if not (seen.left_out or seen.failed) else "nothing was kept"
        return
    if totals.first_bad:
        yield f"NaN or Inf, first at step {totals.first_bad[0]} in {printable(totals.first_bad[1])}"
    yield f"{_models(seen)}: {_steps(tap, totals)}, {_many(totals.records, 'record')}{_loss(totals)}"
    for path in seen.further:
        yield f"another model's run: tensortap show {_short(path)}"
    yield f"look at them: tensortap show {_short(str(tap.path))}"


def _why_none() -> str:
    return next((why for name, why in _WHY_NONE.items() if name in sys.modules), "the script did not import torch")


def _left_out(seen: Seen, tap: Tap | None) -> Iterator[str]:
    for name, why in seen.left_out.items():
        yield f"not watched: {printable(name)}: {why}"
    yield from seen.unmatched
    unseen = {} if tap is None else tap.run.info.get("unseen", {})
    for why, count in Counter(unseen.values()).most_common():
        first = next(site for site, reason in unseen.items() if reason == why)
        yield f"not seen: {printable(first)}{f' and {count - 1} more' if count > 1 else ''} ({why})"
    for name, count in ({} if tap is None else tap.counts).items():
        if name != "unseen":
            yield f"{name.replace('_', ' ')}: {count}"


def _spawned(spawned: Mapping[str, int]) -> Iterator[str]:
    for method, count in spawned.items():
        told = "are not seen" if method == "fork" else "record by themselves, as ranks of one run"
        yield f"{count} process{'' if count == 1 else 'es'} started by torch.multiprocessing ({method}) {told}"


def _models(seen: Seen) -> str:
    if len(seen.models) == 1:
        return next(iter(seen.models.values()))
    return ", ".join(f"{printable(name)} ({kind})" for name, kind in seen.models.items())


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
