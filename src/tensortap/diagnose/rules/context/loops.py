"""Rules on the training loop: order of calls, modes, batches, batch normalisation, ties, structure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import rule
from tensortap.diagnose.rules.context.shared import cause, events, lines_of, modules, owner, totals
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding

_MOST_PLACES: Final = 20


@rule("gradients_not_reset", severity="error")
def gradients_not_reset(history: RunHistory, *, share: float = 0.5, least: int = 3) -> Iterator[Finding]:
    """Steps use gradients that still hold those of earlier steps: zero_grad is missing.

    In a share `share` of the cases, at least `least` times.
    """
    known = totals(history)
    wrong = known.get("steps_on_stale_gradients", 0)
    if wrong >= least and wrong >= share * known.get("steps", 0):
        found = [e for e in events(history, "loop") if "stale" in e.data.get("gradients", ())]
        yield cause(found, f"In {wrong} of {known['steps']} steps gradients were added to those of the steps before.",
                    "Call optimizer.zero_grad() before backward.", code=next(iter(lines_of(history, "backward")), ""),
                    steps_on_stale_gradients=wrong)  # fmt: skip


@rule("gradients_reset_early", severity="error")
def gradients_reset_early(history: RunHistory, *, share: float = 0.5, least: int = 3) -> Iterator[Finding]:
    """Gradients are thrown away before the optimizer uses them.

    In a share `share` of the cases, at least `least` times.
    """
    known = totals(history)
    steps, backwards = known.get("steps", 0), known.get("backwards", 0)
    line = next(iter(lines_of(history, "zero_grad")[::-1]), "")
    empty, thrown = known.get("steps_without_gradients", 0), known.get("backwards_thrown_away", 0)
    looked_at = known.get("steps_looked_at", steps)
    if empty >= least and empty >= share * looked_at and backwards:
        yield cause(events(history, "loop"), f"{empty} of {looked_at} steps had no gradient, although backward ran "
                    f"{backwards} times.", "Call zero_grad before backward or after step, not between.", code=line,
                    steps_without_gradients=empty)  # fmt: skip
    elif thrown >= least and thrown >= share * (backwards - steps) and len(lines_of(history, "backward")) == 1:
        yield cause(events(history, "loop"), f"{thrown} of {backwards} backward passes were thrown away before a step: "
                    "gradients are reset between micro-batches.", "Reset them once, after optimizer.step().", code=line,
                    thrown_away=thrown)  # fmt: skip


@rule("step_missing", severity="error")
def step_missing(history: RunHistory, *, least: int = 5) -> Iterator[Finding]:
    """Gradients are computed, there is an optimizer, and it never steps.

    At least `least` times.
    """
    known = totals(history)
    if known.get("backwards", 0) >= least and not known.get("steps") and events(history, "optimizer"):
        yield cause(events(history, "backward"), f"backward ran {known['backwards']} times, and no optimizer stepped.",
                    "Call optimizer.step() after backward.")  # fmt: skip


@rule("backward_missing", severity="error")
def backward_missing(history: RunHistory, *, least: int = 3) -> Iterator[Finding]:
    """An optimizer steps, and no gradient was ever computed.

    At least `least` times.
    """
    known = totals(history)
    if known.get("steps", 0) >= least and not known.get("backwards") and known.get("steps_without_gradients"):
        yield cause(events(history, "loop"), f"The optimizer stepped {known['steps']} times without a gradient.",
                    "Call loss.backward() before optimizer.step().")  # fmt: skip


@rule("accumulation_unscaled")
def accumulation_unscaled(history: RunHistory) -> Iterator[Finding]:
    """Gradients of several micro-batches are added and the loss is not divided by their number."""
    added = [e for e in events(history, "loop") if e.data.get("gradients", [])[1:].count("added") >= 1]
    passes = events(history, "backward")
    one_line = len({e.code for e in passes}) == 1
    means = all(e.data.get("reduction") == "mean" for e in events(history, "loss") if e.data.get("train"))
    plain = passes and not any(e.data.get("scaled") for e in passes)
    if added and one_line and plain and means and events(history, "loss") and added[0].name in ("SGD", "RMSprop"):
        count = len(added[0].data["gradients"])
        yield cause(added, f"The mean losses of {count} micro-batches are added: the step is {count} times as large.",
                    f"Divide the loss by {count}.", code=passes[0].code, micro_batches=count)  # fmt: skip


@rule("graph_detached", severity="error")
def graph_detached(history: RunHistory) -> Iterator[Finding]:
    """Parameters that an optimizer holds never get a gradient, although their modules run."""
    known = totals(history)
    names = known.get("unreached", [])
    ran = {place.site for place in history.places if place.port == "output"}
    if not names or not known.get("backwards"):
        return
    cut = [name for name in names if _ran(owner(name), ran)]
    whole = known["unreached_count"] >= known.get("held", 0)
    if cut or whole:
        first = (cut or names)[0]
        said = "The loss depends on no parameter" if whole else f"The loss does not depend on {owner(first) or first}"
        calls = [e for e in events(history, "loss") if e.data.get("train")]
        yield cause(events(history, "backward")[:1], f"{said}: {text.counted(known['unreached_count'], 'parameter')} "
                    "of the optimizer never get a gradient.",
                    "Look for detach(), .data, .item(), numpy or no_grad on the "
                    "way from it to the loss.", site=owner(first), places=names[:_MOST_PLACES],
                    code=calls[0].code if calls and whole else "",
                    severity="info" if not whole and _is_side_branch(history, known, names) else "")  # fmt: skip


def _is_side_branch(history: RunHistory, known: dict[str, Any], names: list[str]) -> bool:
    """Return whether one or two layers are cut off while the first layer learns: an unused output.

    Whoever cuts the way from the loss cuts it for all that comes before.
    """
    cut = {owner(name) for name in names}
    taught = {owner(name) for event in events(history, "parameters") for name in event.data.get("names") or ()}
    ran = [place.site for place in history.places if place.port == "output" and place.site in cut | taught]
    return known["unreached_count"] <= len(names) and len(cut) <= 2 and bool(ran) and ran[0] not in cut


def _ran(module: str, ran: set[str]) -> bool:
    return module in ran or any(site.startswith(f"{module}.") for site in ran)


@rule("trained_in_eval_mode")
def trained_in_eval_mode(history: RunHistory, *, share: float = 0.3, least: int = 5) -> Iterator[Finding]:
    """The model is trained in evaluation mode: dropout is off and batch normalisation learns no statistics.

    In a share `share` of the cases, at least `least` times.
    """
    known = totals(history)
    wrong = known.get("trained_in_eval_mode", 0)
    if wrong >= least and wrong >= share * known.get("steps", 0):
        found = [e for e in events(history, "mode") if e.data.get("mode") == "eval"]
        yield cause(found, f"{wrong} of {known['steps']} steps trained in evaluation mode.",
                    "Call model.train() before training, also after each evaluation.", wrong=wrong)  # fmt: skip


@rule("eval_in_train_mode")
def eval_in_train_mode(history: RunHistory, *, least: int = 2) -> Iterator[Finding]:
    """The model is evaluated in training mode: dropout is on, and batch normalisation learns from the test data.

    At least `least` times.
    """
    known = totals(history)
    wrong = known.get("eval_in_train_mode", 0)
    if wrong < least and (wrong := _unused_calls(known)) >= least:
        if any(e.data.get("has_modes") for e in events(history, "model")):
            yield cause(events(history, "batch")[:1], f"The model is called in training mode {wrong} times without a "
                        "backward, in rows between epochs: an evaluation with dropout on.",
                        "Call model.eval() before it, with torch.no_grad(), and model.train() after it.",
                        calls=wrong)  # fmt: skip
    elif wrong >= least:
        found = [e for e in events(history, "mode") if e.data.get("mode") == "train_no_grad"]
        yield cause(found, "The model is called without gradients and in training mode, for itself: an evaluation "
                    "with dropout on, or batch normalisation by the batch.",
                    "Call model.eval() before it and model.train() after it.", calls=wrong)  # fmt: skip


def _unused_calls(known: dict[str, Any]) -> int:
    """Return how many calls with gradients no backward followed, as many at the end as between epochs before."""
    rest = int(known.get("calls_after_last_backward", 0))
    counts: dict[int, int] = {int(calls): n for calls, n in known.get("calls_per_backward", {}).items()}
    between = counts.get(rest + 1, 0)
    if not rest or not between or set(counts) != {1, rest + 1} or between > 0.2 * counts[1]:
        return 0
    return rest * (between + 1)


@rule("order_repeated")
def order_repeated(history: RunHistory, *, least: int = 2) -> Iterator[Finding]:
    """A loader that shuffles gives its samples in the same order in each epoch, `least` times or more.

    A `DistributedSampler` was not told the epoch, or the seed is set again in each.
    """
    by_loader: dict[str, list[TrainingEvent]] = {}
    for event in events(history, "epoch"):
        if event.data.get("sampler") in ("RandomSampler", "DistributedSampler") and event.data.get("order_before"):
            by_loader.setdefault(event.name, []).append(event)
    for found in by_loader.values():
        orders = [event.data["order_before"] for event in found]
        if len(orders) >= least and len(set(orders)) == 1:
            distributed = found[0].data["sampler"] == "DistributedSampler"
            yield cause(found, f"{len(orders)} epochs began with the same samples, although the loader shuffles.",
                        "Call sampler.set_epoch(epoch) before each epoch." if distributed
                        else "Set the seed once, before the epochs.", epochs=len(orders))  # fmt: skip
            return
    yield from _epoch_not_told(history)


def _epoch_not_told(history: RunHistory) -> Iterator[Finding]:
    """Judge samplers that shuffle by the epoch they are told, also those that are made again for each epoch.

    Of loaders that train, within one training: where an optimizer was made in between, it is another one.
    """
    trained = {str(e.data.get("loader")) for e in events(history, "batch") if e.data.get("mode") == "train"}
    made = [event.step for event in events(history, "optimizer")]
    by_line: dict[str, list[TrainingEvent]] = {}
    for event in events(history, "epoch"):
        if "sampler_epoch" in event.data:
            by_line.setdefault(event.data.get("made_at") or event.name, []).append(event)
    for found in by_line.values():
        told = {(event.data["sampler_epoch"], event.data.get("sampler_seed")) for event in found}
        again = any(a.step < step <= b.step for a, b in pairwise(found) for step in made)
        if len(found) > 1 and len(told) == 1 and not again and any(event.name in trained for event in found):
            yield cause(found, f"{len(found)} epochs have the same order: DistributedSampler shuffles by the epoch, "
                        f"and was told {next(iter(told))[0]} each time.",
                        "Call sampler.set_epoch(epoch) before each epoch.", epochs=len(found))  # fmt: skip
            return


@rule("batchnorm_cannot_estimate")
def batchnorm_cannot_estimate(history: RunHistory) -> Iterator[Finding]:
    """Batch normalisation cannot estimate its statistics: batches of one sample, or a momentum near 0 or 1."""
    norms = [m for m in modules(history) if "BatchNorm" in m["type"]]
    fixed = [
        m for m in norms if m.get("track_running_stats", True) and (_fresh_share(m) <= 1e-4 or _fresh_share(m) > 0.9)
    ]
    if fixed:
        last = "those of the last batch" if _fresh_share(fixed[0]) > 0.5 else "those of the beginning"
        yield cause(events(history, "model")[:1], f"{fixed[0]['type']} has momentum {fixed[0]['momentum']}: its "
                    f"running statistics are {last}, and never settle.",
                    "0.1 is usual (PyTorch's momentum is the weight of the new batch, Keras' that of the old ones).",
                    site=fixed[0]["path"], places=[m["path"] for m in fixed[1:]])  # fmt: skip
    trained = [e for e in events(history, "batch") if e.data.get("mode") == "train"]
    single = [e for e in trained if e.data.get("input", {}).get("shape", [0])[:1] == [1]]
    sized = [e for e in trained if "input" in e.data]
    if norms and single and len(single) >= 0.8 * len(sized):
        line = next((e.data.get("made_at", "") for e in events(history, "epoch")), "")
        yield cause(single, "Batches hold one sample: batch normalisation normalises it by itself.",
                    "Use larger batches, or GroupNorm.", site=norms[0]["path"], code=line)  # fmt: skip


def _fresh_share(norm: dict[str, Any]) -> float:
    """Return the weight of the new batch in running statistics; the usual one where none was recorded."""
    momentum = norm.get("momentum")
    return float(momentum) if isinstance(momentum, (int, float)) else 0.1  # Keras' is recorded in the same sense


@rule("tie_broken", severity="error")
def tie_broken(history: RunHistory) -> Iterator[Finding]:
    """Weights that were one tensor are two."""
    for names in totals(history).get("broken_ties", ()):
        yield cause([], f"{' and '.join(names)} were one tensor at first and are not any more.",
                    "Tie them again after moving, loading or replacing: a.weight = b.weight.", site=owner(names[-1]),
                    places=names)  # fmt: skip


@rule("linear_stack")
def linear_stack(history: RunHistory) -> Iterator[Finding]:
    """Linear layers follow each other with no activation between: together they are one.

    Info where most layers have one: an encoder's last layer may well be followed by a head's first.
    """
    found = [e for e in events(history, "backward") if e.data.get("linear_pairs")]
    if found:
        pairs = [tuple(map(owner, pair)) for pair in found[0].data["linear_pairs"]]
        none = found[0].data.get("weighted", 0) > 2 and all(not e.data.get("activations", 1) for e in found)
        most = none or (len(pairs) > 1 and 2 * len(pairs) >= found[0].data.get("weighted", len(pairs) + 1) - 1)
        places = list(dict.fromkeys(name for pair in pairs for name in pair))
        yield cause(found, f"{pairs[0][1]} follows {pairs[0][0]} with no activation between: together they are one "
                    "linear layer.", "Put an activation between them.", site=pairs[0][0], places=places,
                    severity="" if most else "info")  # fmt: skip


@rule("batches_repeated")
def batches_repeated(history: RunHistory, *, share: float = 0.8, least: int = 6) -> Iterator[Finding]:
    """A loader of several batches gives the same one again and again.

    In a share `share` of the cases, at least `least` times.
    """
    epochs = [e for e in events(history, "epoch") if (e.data.get("batches") or 0) > 1]
    trained = [e for e in events(history, "batch") if e.data.get("mode") == "train" and e.data.get("fingerprint")]
    marks = [e.data["fingerprint"] for e in trained]
    same = [a == b for a, b in pairwise(marks)]
    generated = [e for e in trained if (e.data.get("batches") or 0) > 1]
    if len(generated) >= least and len({e.data["fingerprint"] for e in generated}) == 1:
        yield cause(generated, f"Of {generated[0].data['batches']} batches in an epoch all are the same.",
                    "Does the generator use the index that it is given?")  # fmt: skip
    short = [e for e in epochs if e.data.get("epoch", 0) > 1 and e.data.get("batches_before") == 1]
    if len(same) >= least and np.mean(same) >= share and len(short) >= least - 1:
        yield cause(epochs, f"Of {epochs[0].data['batches']} batches the loader gives the first, again and again.",
                    "Iterate over the loader, or keep one iterator: next(iter(loader)) starts from the beginning.",
                    code=short[0].code)  # fmt: skip


@rule("data_changed")
def data_changed(history: RunHistory, *, growth: float = 4.0) -> Iterator[Finding]:
    """Batches of a loader grow from epoch to epoch: the data set is changed in place.

    By a factor of `growth`.
    """
    by_epoch: dict[int, list[TrainingEvent]] = {}
    for event in events(history, "batch"):
        if event.data.get("mode") == "train" and "std" in event.data.get("input", {}) and "epoch" in event.data:
            by_epoch.setdefault(event.data["epoch"], []).append(event)
    sizes = [float(np.median([e.data["input"]["std"] for e in by_epoch[k]])) for k in sorted(by_epoch)]
    if len(sizes) > 2 and all(b > 1.5 * a for a, b in pairwise(sizes)) and sizes[-1] > growth * sizes[0]:
        found = [event for group in by_epoch.values() for event in group]
        yield cause(found, f"The std of the inputs grows from {text.number(sizes[0])} to {text.number(sizes[-1])} over "
                    f"{len(sizes)} epochs.", "Does the data set change its samples in place (*=, out=)? Copy first.",
                    sizes=sizes)  # fmt: skip
