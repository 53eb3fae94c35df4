"""Rules on optimizers: rates, what they hold, how often they are made, clipping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import rule
from tensortap.diagnose.rules.context.shared import (
    cause,
    events,
    goes_wrong,
    jump,
    lines_of,
    modules,
    owner,
    totals,
    update_ratios,
)
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding

_HALF: Final = ("bfloat16", "float16")
_COUPLED: Final = ("SGD", "Adam", "RMSprop", "Adagrad", "NAdam", "RAdam")  # decay is added to the gradient


def _made(history: RunHistory) -> list[TrainingEvent]:
    return events(history, "optimizer")


def _groups(event: TrainingEvent) -> list[dict[str, Any]]:
    return list(event.data.get("groups", ()))


@rule("learning_rate_zero", severity="error")
def learning_rate_zero(history: RunHistory) -> Iterator[Finding]:
    """The learning rate is zero from the start, or falls to a millionth and training goes on."""
    for event in _made(history):
        groups = _groups(event)
        rising = any(rate.data.get("number") == event.data["number"] for rate in events(history, "rate"))
        if groups and all(not group.get("lr") for group in groups) and not rising:
            yield cause([event], "The learning rate is 0: nothing is trained.", "Give the optimizer a rate, such as "
                        "1e-3 for Adam.")  # fmt: skip


@rule("learning_rate_low")
def learning_rate_low(
    history: RunHistory, *, ratio: float = 5e-6, stuck: float = 1e-4, steps: int = 4
) -> Iterator[Finding]:
    """No step moves the weights by more than `ratio` of their size, although there is a gradient.

    Or by more than `stuck` of it while the loss stays where it was. Over at least `steps` steps.
    """
    found, ratios = update_ratios(history)
    given, used = _first_rates(history)
    lost = used is not None and 0 < used < 1e-6  # so small that weights may not change in their last digit
    moved = [r for r in ratios if r > 0 or lost]
    most = stuck if goes_wrong(history) else ratio
    if len(moved) >= steps and max(ratios) < most and not _clipped(history) and not _warms_up(history):
        scheduler = _lowered_by(history) if given and used is not None and used < 0.01 * given else None
        rate = f"The learning rate is {'unknown' if used is None else text.number(used)}"
        if scheduler is None:
            why, advice, code = "", "Raise the learning rate.", _line(history)
        else:
            why = f": {scheduler.name} made it of {text.number(given)} before the first step"
            advice = "A scheduler's function returns a factor of the optimizer's rate, not a rate."
            code = scheduler.code
        yield cause(found, f"A step moves the weights by at most {text.number(max(ratios))} of their size; 0.001 is "
                    f"usual. {rate}{why}.", advice, code=code, ratio=max(ratios))  # fmt: skip


def _first_rates(history: RunHistory) -> tuple[float, float | None]:
    """Return the rate that the optimizer was given, and the one of its first step; zero and None where unknown."""
    made = [float(g.get("lr") or 0.0) for event in _made(history)[:1] for g in _groups(event)[:1]]
    before = [event for event in events(history, "rate")[:1] if event.step == 0]
    changed = [float(g["lr"]) for event in before for g in _groups(event)[:1] if g.get("lr")]
    return next(iter(made), 0.0), next(iter(changed or made), None)


def _lowered_by(history: RunHistory) -> TrainingEvent | None:
    """Return the scheduler that there was before the first step."""
    return next((event for event in events(history, "scheduler") if event.step == 0), None)


def _warms_up(history: RunHistory) -> bool:
    """Return whether the learning rate is higher at the end than it was at first."""
    rates = [group["lr"] for e in events(history, "rate") for group in e.data.get("groups", ())[:1] if group.get("lr")]
    first = [g.get("before") for e in events(history, "rate")[:1] for g in e.data.get("groups", ())[:1]]
    return bool(rates) and rates[-1] > 1.5 * float(first[0] or 0.0)


@rule("updates_lost", severity="error")
def updates_lost(history: RunHistory, *, share: float = 0.5, steps: int = 3) -> Iterator[Finding]:
    """Parameters are kept in half precision, and steps that have a gradient change nothing: updates are rounded away.

    In a share `share` of the kernels, at `steps` steps at least.
    """
    half = [d for event in events(history, "model") for d in event.data.get("dtypes", ()) if d in _HALF]
    wrong = [event for event in events(history, "parameters") if _unmoved(event) >= share]
    if half and len(wrong) >= steps:
        yield cause(wrong, f"Parameters are {half[0]}, and steps leave {text.percent(_unmoved(wrong[0]), 1)} of the "
                    "kernels as they were, although they have gradients.",
                    "Keep parameters in float32 (torch.autocast for the rest), or raise the learning rate.",
                    code=_line(history))  # fmt: skip


def _unmoved(event: TrainingEvent) -> float:
    """Return the share of kernels that have a gradient and were not changed."""
    columns = (event.data.get(name) or () for name in ("shapes", "update", "grad"))
    taught = [
        u for shape, u, g in zip(*columns, strict=False) if len(shape) > 1 and isinstance(g[0], float) and g[0] > 0
    ]
    return sum(u == 0 for u in taught) / len(taught) if taught else 0.0


@rule("learning_rate_high", severity="error")
def learning_rate_high(
    history: RunHistory, *, ratio: float = 0.2, steps: int = 2, once: float = 2.0
) -> Iterator[Finding]:
    """Steps move the weights by more than `ratio` of their size, and the loss does not fall, or jumps and stays.

    Over at least `steps` steps; by more than `once`, in one step: after it there may be no gradient left.
    """
    found, ratios = update_ratios(history)
    early = [(e, r) for e, r in zip(found, ratios, strict=True)][:8]
    high = [(event, r) for event, r in early if r > ratio or not np.isfinite(r)]
    enough = len(high) >= min(steps, len(early)) or any(r > once or not np.isfinite(r) for _, r in early)
    jumped = jump(history)
    if high and enough and (goes_wrong(history) or jumped) and not _absurd(history):
        rates = [g.get("lr") for event in _made(history) for g in _groups(event)]
        top = max(r for _, r in high)
        said = "the loss does not fall" if jumped is None else (
            "the loss goes from {} up to {} and ends at {}".format(*map(text.number, jumped))
        )  # fmt: skip
        yield cause([e for e, _ in high], f"Steps move the weights by up to {text.number(top)} of their size (0.001 is "
                    f"usual), and {said}. The learning rate is "
                    f"{text.number(float(rates[0] or 0)) if rates else 'unknown'}.",
                    "Lower the learning rate tenfold, or warm it up.", code=_line(history), ratio=top)  # fmt: skip


def _line(history: RunHistory) -> str:
    return next(iter(lines_of(history, "optimizer")), "")


def _clipped(history: RunHistory, most: float = 1e-3) -> bool:
    factors = [event.data.get("factor", 1.0) for event in events(history, "clip")]
    return bool(factors) and float(np.median(factors)) < most


@rule("clipping_too_hard")
def clipping_too_hard(history: RunHistory, *, most: float = 1e-3) -> Iterator[Finding]:
    """Clipping leaves less than `most` of the gradient, in most steps."""
    found = events(history, "clip")
    if _clipped(history, most):
        factor = float(np.median([event.data["factor"] for event in found]))
        yield cause(found, f"Clipping to {text.number(found[0].data['most'])} leaves {text.number(factor)} of the "
                    "gradient.", "Clip to about the usual norm of the gradient, such as 1.", factor=factor)  # fmt: skip


def _absurd(history: RunHistory) -> bool:
    return any((g.get("momentum") or 0) >= 1 for event in _made(history) for g in _groups(event))


@rule("momentum_absurd", severity="error")
def momentum_absurd(history: RunHistory) -> Iterator[Finding]:
    """Momentum is 1 or more: past gradients never fade."""
    for event in _made(history):
        worst = max(((g.get("momentum") or 0) for g in _groups(event)), default=0)
        if worst >= 1:
            yield cause(
                [event], f"Momentum is {text.number(float(worst))}: past gradients never fade.", "0.9 is usual."
            )
            return
        betas = next((g["betas"] for g in _groups(event) if isinstance(g.get("betas"), list)), None)
        if betas and betas[0] > betas[1] and betas[0] >= 0.99:
            yield cause([event], f"The betas are {betas[0]} and {betas[1]}: the mean of gradients fades more slowly "
                        "than that of their squares.", "(0.9, 0.999) is usual.")  # fmt: skip
            return


@rule("weight_decay_high")
def weight_decay_high(
    history: RunHistory, *, coupled: float = 0.1, decoupled: float = 2.0, penalty: float = 5.0
) -> Iterator[Finding]:
    """Weight decay, or a penalty on the weights, is so strong that it outweighs the loss.

    More than `coupled`, decoupled, as in AdamW, more than `decoupled`; a penalty, `penalty` times the loss itself.
    """
    yield from _penalty(history, penalty)
    for event in _made(history):
        worst = max(((g.get("weight_decay") or 0) for g in _groups(event)), default=0)
        if worst >= (coupled if event.name in _COUPLED else decoupled):
            yield cause([event], f"Weight decay is {text.number(float(worst))}: it pulls every weight to zero.",
                        "1e-4 to 1e-2 is usual.", decay=float(worst))  # fmt: skip
            return


def _penalty(history: RunHistory, factor: float) -> Iterator[Finding]:
    """Compare what backward is called on with the loss in it, where parameters themselves are added to it."""
    found = [e for e in events(history, "backward") if e.data.get("penalty") and _is_number(e.data.get("value"))]
    losses = [
        e.data["value"] for e in events(history, "loss") if e.data.get("train") and _is_number(e.data.get("value"))
    ]
    if not losses or len(found) <= len(events(history, "backward")) / 2:
        return
    whole, own = float(np.median([e.data["value"] for e in found[:3]])), float(np.median(losses[:3]))
    if own > 0 and whole > (1 + factor) * own:
        yield cause(found, f"The loss is {text.number(own)}, and with the penalty on the weights {text.number(whole)}: "
                    "the weights are pulled to zero.", "Make the penalty's factor a hundred times smaller.",
                    code=found[0].data.get("made_at", ""), loss=own, penalty=whole - own)  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


@rule("eps_too_small", severity="error")
def eps_too_small(history: RunHistory) -> Iterator[Finding]:
    """Adam's eps is zero in the parameters' dtype, so that a gradient of zero divides by zero."""
    half = any("float16" in event.data.get("dtypes", ()) for event in events(history, "model"))
    for event in _made(history):
        tiny = [g["eps"] for g in _groups(event) if isinstance(g.get("eps"), float) and g["eps"] < 6e-8]
        if half and tiny:
            yield cause([event], f"eps is {text.number(tiny[0])}, which is 0 in float16.",
                        "Keep parameters in float32 (torch.amp), or use eps=1e-4.", eps=tiny[0])  # fmt: skip
            return


@rule("scheduler_per_batch", severity="error")
def scheduler_per_batch(history: RunHistory, *, fall: float = 0.05, run: int = 5) -> Iterator[Finding]:
    """A scheduler meant for epochs is stepped at every batch: the rate is nearly gone before half of the run.

    By a factor of `fall`, within a share `run` of the run, after the highest rate.
    """
    schedulers = events(history, "scheduler")
    kinds = {event.name for event in schedulers}
    rates = events(history, "rate")
    steps = totals(history).get("steps", 0)
    if not kinds or len(rates) < run or not steps:
        return
    lrs = [(event.step, event.data["groups"][0]["lr"]) for event in rates if event.data.get("groups")]
    first = rates[0].data["groups"][0].get("before") or lrs[0][1]
    gaps = np.diff([step for step, _ in lrs])
    highest = int(np.argmax([lr for _, lr in lrs]))  # before it the rate is warmed up, maybe from zero
    gone = [step for step, lr in lrs[highest:] if lr < fall * first]
    last = max((event.step for event in history.events("parameters")), default=lrs[-1][0])
    for_epochs = bool(kinds & {"StepLR", "ExponentialLR", "MultiStepLR"})
    soon = gone and gone[0] - lrs[0][0] < (max(40, 0.3 * last) if for_epochs else 0.5 * last)
    if soon and np.median(gaps) <= 2 and lrs[-1][1] < fall * first and not _rises(lrs):
        line = next(iter(lines_of(history, "schedule")), "")
        yield cause(rates, f"The rate falls from {text.number(first)} to {text.number(lrs[-1][1])}: "
                    f"{' and '.join(sorted(kinds))} is stepped at every batch.",
                    "Call scheduler.step() once an epoch, or give it the number of batches.", code=line,
                    places=lines_of(history, "scheduler"))  # fmt: skip


@rule("scheduler_never_stepped")
def scheduler_never_stepped(history: RunHistory, *, steps: int = 20) -> Iterator[Finding]:
    """A scheduler is made and never stepped, in `steps` steps of the optimizer or more."""
    made = events(history, "scheduler")
    seen = all(event.data.get("seen") for event in made)
    if made and seen and not events(history, "schedule") and totals(history).get("steps", 0) >= steps:
        yield cause(made[:1], f"{made[0].name} is made and never stepped: the learning rate stays what it is.",
                    "Call scheduler.step() after each epoch, or after each step of the optimizer.")  # fmt: skip


def _rises(rates: list[tuple[int, float]]) -> bool:
    """Return whether a rate goes up again after it has fallen, as warm restarts do."""
    values = [rate for _, rate in rates]
    lowest = int(np.argmin(values))
    return max(values[lowest:]) > 10 * max(values[lowest], 1e-12) and lowest > 0


@rule("optimizer_recreated")
def optimizer_recreated(history: RunHistory, *, times: int = 3) -> Iterator[Finding]:
    """An optimizer is made again for the same parameters, and forgets its state each time.

    `times` times or more.
    """
    again = [event for event in _made(history) if event.data.get("same_parameters") and event.code]
    lines = Counter(event.code for event in again)
    for line, count in lines.items():
        mine = [event for event in again if event.code == line]
        if (count >= times and mine[0].name != "SGD") or count >= 10:
            yield cause(mine, f"{mine[0].name} is made again for the same parameters, {count} times at least: its "
                        "averages start again.", "Make it once, before the loop.", code=line, times=count)  # fmt: skip


@rule("optimizer_stale", severity="error")
def optimizer_stale(history: RunHistory) -> Iterator[Finding]:
    """An optimizer holds parameters that no model has, while a model has some that no optimizer holds."""
    known = totals(history)
    for event in events(history, "holds"):
        inputs = event.data.get("foreign") == 1 and not event.data.get("held")  # a picture that is optimised
        if event.data.get("foreign") and known.get("untrained_count") and not inputs:
            names = known["untrained"]
            yield cause([event], f"{event.name} holds {event.data['foreign']} parameters that are in no model, and "
                        f"{text.counted(known['untrained_count'], 'parameter')} that get gradients are in no "
                        f"optimizer: {', '.join(names[:3])}.", "Make the optimizer after the layers are replaced.",
                        site=owner(names[0]), places=names)  # fmt: skip
            return


@rule("optimizer_incomplete", severity="error")
def optimizer_incomplete(history: RunHistory) -> Iterator[Finding]:
    """Parameters get gradients and no optimizer holds them."""
    known = totals(history)
    names = known.get("untrained", [])
    stale = any(event.data.get("foreign") for event in events(history, "holds"))
    if names and known.get("steps", 0) > 2 and not stale:  # one that has not stepped yet is not known to hold any
        yield cause(_made(history)[:1], f"{text.counted(known['untrained_count'], 'parameter')} of "
                    f"{known['trainable']} get gradients, and no optimizer holds them.",
                    "Give the optimizer model.parameters(), or freeze them: requires_grad_(False).",
                    site=owner(names[0]), places=names, untrained=known["untrained_count"],
                    severity="info" if _head_is_held(history, names, known) else "")  # fmt: skip


def _head_is_held(history: RunHistory, names: list[str], known: dict[str, Any]) -> bool:
    """Return whether the last layer is trained and only earlier ones are not: fine-tuning without freezing them."""
    heads = {owner(e.data.get("produced_by")) for e in events(history, "loss") if e.data.get("train")} - {""}
    listed = known["untrained_count"] <= len(names)
    return bool(heads) and listed and not any(owner(name) in heads for name in names)


@rule("frozen")
def frozen(history: RunHistory) -> Iterator[Finding]:
    """The last layer is frozen while others are trained: fine-tuning freezes the first ones."""
    for event in events(history, "model"):
        names = set(event.data.get("frozen", ()))
        leaves = [m["path"] for m in event.data.get("modules", ()) if _is_last(m)]
        if (
            names
            and leaves
            and {f"{leaves[-1]}.weight", f"{leaves[-1]}.kernel"} & names
            and event.data["frozen_count"] < event.data["parameters"]
            and not _has_adapters(event.data)
        ):
            keras = f"{leaves[-1]}.kernel" in names
            undo = f"Set {leaves[-1]}.trainable = True before compile()" if keras else "Remove requires_grad = False"
            yield cause([event], f"{event.data['frozen_count']} of {event.data['parameters']} parameters are frozen, "
                        f"{leaves[-1]}, the last layer, among them.", f"{undo} where you train.",
                        site=leaves[-1], places=sorted(names)[:12])  # fmt: skip


def _is_last(module: dict[str, Any]) -> bool:
    """Return whether a module may be a model's last layer; in Keras a model inside is another's, as a GAN's critic."""
    return module["type"] in ("Linear", "LazyLinear") or (module["type"] == "Dense" and "." not in module["path"])


def _has_adapters(data: dict[str, Any]) -> bool:
    """Return whether most is frozen, and kernels are trained down to the last layers, as those of adapters are."""
    return data["frozen_count"] >= 0.4 * data["parameters"] and float(data.get("last_trained", 0.0)) > 0.7


@rule("dropout_high")
def dropout_high(history: RunHistory, *, most: float = 0.75) -> Iterator[Finding]:
    """A dropout removes more than `most` of its input."""
    wrong = [m for m in modules(history) if "Dropout" in m["type"] and (m.get("p") or 0) > most]
    if wrong:
        yield cause(events(history, "model")[:1], f"Dropout removes {text.percent(wrong[0]['p'], 1)} of its input.",
                    "0.1 to 0.5 is usual; p is the share that is removed.", site=wrong[0]["path"],
                    places=[m["path"] for m in wrong[1:]], p=wrong[0]["p"])  # fmt: skip
