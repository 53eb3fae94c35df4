"""Rules on inputs that are not normalised, and on modules that never ran."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory, SiteHistory
from tensortap.diagnose.rule import NO_CONTEXT, NoData, rule
from tensortap.diagnose.rules.context.shared import gets_on
from tensortap.diagnose.rules.samples import outsized_sample
from tensortap.diagnose.rules.shared import named
from tensortap.finding import Finding, Steps
from tensortap.select.ports import FORWARD_PORTS
from tensortap.store import facts

_TINY: Final = 0.01  # inputs that never exceed it were scaled twice
_HOLDERS: Final = frozenset(("ModuleList", "ModuleDict", "ParameterList", "ParameterDict"))
_USED_UNCALLED: Final = frozenset(("NonDynamicallyQuantizableLinear",))  # MultiheadAttention takes its weight only


@rule("inputs_not_normalised")
def inputs_not_normalised(
    history: RunHistory,
    *,
    bound: float = 1.0,
    mean: float = 0.2,
    std: float = 10.0,
    far: float = 10.0,
    extreme: float = 50.0,
) -> Iterator[Finding]:
    """The model's input leaves ±`bound` (UMLAUT), and its |mean| is above `mean` (SageMaker) or its std above `std`.

    Nothing is said where the first layer normalises. It is only noted while values stay within `far`, and where the
    loss falls to a fifth all the same, unless mean or std are beyond `extreme`. Where the input was not recorded, the
    training context is asked, and values must go beyond `far`.
    """
    if _normalises(history):
        return
    given = _given(history)
    if not given and history.events("batch"):
        yield from _of_batches(history, far, extreme)
        return
    sites = [site for site in given if site.floating]
    if not sites:
        raise NoData(
            "the model's input holds no floats" if given
            else "the model's input was not recorded: tt.watch(model, ':input', ...)"
        )  # fmt: skip
    fine = gets_on(history)
    for site in [site for site in sites if len(site.shape) != 1]:  # a number for each sample is a time, or a weight
        finite = np.maximum(site["numel"] - site["nan"] - site["posinf"] - site["neginf"], 0)
        weight = finite / max(finite.sum(), 1)
        center = float(np.nansum(weight * site["mean"]))
        width = float(np.sqrt(np.nansum(weight * (site["std"] ** 2 + (site["mean"] - center) ** 2))))
        low, high = float(np.nanmin(site["min"], initial=np.inf)), float(np.nanmax(site["max"], initial=-np.inf))
        tiny = 0 < max(abs(low), abs(high)) < _TINY
        wide = max(abs(low), abs(high)) > far and max(width, abs(center)) > far / 4
        if tiny or (max(abs(low), abs(high)) > bound and (abs(center) > mean or width > std)):
            yield site.finding(
                np.ones(len(site.steps), bool),
                f"{_called(site.place.slot if len(given) > 1 else '')} ranges from {text.number(low)} to "
                f"{text.number(high)}, with mean {text.number(center)} and std {text.number(width)}.",
                "Scale it to [0, 1] or [−1, 1], or to mean 0 and std 1.", low=low, high=high, mean=center, std=width,
                severity="" if tiny or (wide and not (fine and max(width, abs(center)) < extreme)) else "info",
            )  # fmt: skip


def _normalises(history: RunHistory) -> bool:
    """Return whether the first layer that ran is a normalisation."""
    first = next((site for site in history.sites("output") if site.place.site), None)
    return first is not None and "Norm" in first.type


def _of_batches(history: RunHistory, far: float, extreme: float) -> Iterator[Finding]:
    events = [
        e for e in history.events("batch") if e.data.get("input", {}).get("dtype", "").startswith(("float", "bf"))
    ]
    known = [(event, event.data["input"]) for event in events if "std" in event.data["input"]]
    wide = [
        (e, g) for e, g in known if max(abs(g["min"]), abs(g["max"])) > far and max(g["std"], abs(g["mean"])) > far / 4
    ]
    tiny = [(e, g) for e, g in known if 0 < max(abs(g["min"]), abs(g["max"])) < _TINY]
    wide = tiny if len(tiny) > len(known) / 2 else wide
    if known and len(wide) > len(known) / 2:
        event, given = wide[0]
        fine = gets_on(history) and not tiny and max(given["std"], abs(given["mean"])) < extreme
        yield Finding(
            "", "info" if fine else "", ":input", Steps(event.step, wide[-1][0].step, len(wide)), given,
            f"{_called(event.data.get('slot', ''))} ranges from {text.number(given['min'])} to "
            f"{text.number(given['max'])}, with mean {text.number(given['mean'])} and std {text.number(given['std'])}.",
            advice="Scale it to [0, 1] or [−1, 1], or to mean 0 and std 1.", code=event.code,
        )  # fmt: skip


def _called(slot: str) -> str:
    """Return the name of an input: its own if there are several, since one of them may be the targets."""
    return f"The argument {slot.removeprefix('.')}" if slot.startswith(".") else f"The input{slot and f' {slot}'}"


def _given(history: RunHistory) -> list[SiteHistory]:
    """Return the root's inputs; where they were not recorded, those of the module that ran first."""
    sites = history.sites("input", duplicates=True)
    root = [site for site in sites if not site.place.site]
    outputs = history.sites("output", duplicates=True)
    first = outputs[0].module if outputs else None
    return root or [site for site in sites if site.module == first]


@rule("sample_out_of_size", severity="info")
def sample_out_of_size(history: RunHistory) -> Iterator[Finding]:
    """One sample's values are far larger than those of its batch and of the batches before, at a usual loss."""
    if not history.events("model"):
        raise NoData(NO_CONTEXT)
    if (found := outsized_sample(history)) is not None:
        yield found


@rule("never_ran")
def never_ran(history: RunHistory) -> Iterator[Finding]:
    """Modules that were watched and never ran; the outermost is named.

    Containers that only hold others, modules without parameters, and modules whose parameters got a gradient all the
    same, are left out.
    """
    unseen = history.info.get("unseen")
    if unseen is None and history.snapshot.state != "finished":
        raise NoData("what never ran is known when the run is closed")
    ended = facts.ended_by(history.snapshot)
    if not len(history.snapshot.steps) or (ended and len(history.snapshot.steps) < 2):
        raise NoData(f"{ended or 'the end'} came before one step was over")
    missing = _outermost(history, unseen if isinstance(unseen, Mapping) else {})
    if missing:
        lead, others = next(iter(missing)), list(missing)[1:]
        also = f"; nor did {named(others)}" if others else ""
        fused = all("fused" in str(why) for why in missing.values())
        said = f"It was not seen to run ({missing[lead]}){also}." if fused else f"It never ran{also}."
        evidence = {"modules": len(missing), "also": others[:8]}
        yield Finding(
            "", "info" if fused else "warning", f"{lead}:output", None, evidence, said,
            "Left out of forward() by mistake, or not needed? Its parameters are not trained.",
        )  # fmt: skip


def _outermost(history: RunHistory, unseen: Mapping[str, str]) -> dict[str, str]:
    ran = {place.site for place in history.places if place.port in FORWARD_PORTS}
    used = {site.module for port in ("grad", "update") for site in history.sites(port) if np.any(site["l2"] > 0)}
    silent: dict[str, str] = {}
    cut = _never_reached(history)
    idle = _without_parameters(history)
    for name, why in unseen.items():
        path, _, port = name.rpartition(":")
        kind = history.modules.get(path)
        if cut is not None and not any(_within(name, path) for name in cut):
            continue  # its weights are used without a call, or it has none to train
        if not port.startswith("output") or kind is None or kind in _HOLDERS | _USED_UNCALLED or path in idle:
            continue
        if not any(_within(other, path) for other in ran | used) and not any(_within(path, other) for other in silent):
            silent[path] = why
    return {path: why for path, why in silent.items() if not any(p != path and _within(path, p) for p in silent)}


def _never_reached(history: RunHistory) -> list[str] | None:
    """Return the parameters that no loss depended on, where the training context tells all of them."""
    totals = history.events("totals")
    if not totals or not totals[-1].data.get("backwards") or totals[-1].data.get("unreached_count", 0) > 12:
        return None
    return list(totals[-1].data.get("unreached", ()))


def _without_parameters(history: RunHistory) -> set[str]:
    """Return the modules that hold no parameter, nor does anything inside them, where the run tells."""
    model = history.snapshot.run_json.get("model")
    modules = model.get("modules", ()) if isinstance(model, Mapping) else ()
    counts = {m["path"]: m["parameters"] for m in modules if isinstance(m, Mapping) and "parameters" in m}
    return {path for path in counts if not any(n and _within(other, path) for other, n in counts.items())}


def _within(path: str, outer: str) -> bool:
    return path == outer or not outer or path.startswith(f"{outer}.")
