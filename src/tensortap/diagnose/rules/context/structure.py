"""Rules on what the training context says of structure, of regularisation and of evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tensortap import text
from tensortap.diagnose.history import RunHistory
from tensortap.diagnose.rule import NoData, rule
from tensortap.diagnose.rules.context.shared import cause, events, lines_of_activation, owner, totals
from tensortap.diagnose.training import TrainingEvent
from tensortap.finding import Finding


@rule("parameters_unregistered")
def parameters_unregistered(history: RunHistory) -> Iterator[Finding]:
    """The loss depends on parameters that are in no model and in no optimizer, as those of layers in a plain list."""
    shapes = totals(history).get("unregistered", [])
    if shapes and totals(history).get("steps"):
        many = text.counted(len(shapes), "parameter")
        yield cause(events(history, "optimizer")[:1], f"The loss depends on {many} of shape "
                    f"{', '.join(map(str, shapes[:3]))} that no model and no optimizer knows.",
                    "Keep layers in nn.ModuleList or nn.ModuleDict, not in a list or dict.", shapes=shapes)  # fmt: skip


@rule("layers_shared")
def layers_shared(history: RunHistory) -> Iterator[Finding]:
    """Layers of a list are one and the same, as `[layer] * 3` makes them: they learn one weight.

    A layer that is called several times is one layer in the model too; here it has several places in it.
    """
    for event in events(history, "model"):
        same = [names for names in event.data.get("ties") or () if _differ_by_a_number(names)]
        if same:
            places = list(dict.fromkeys(owner(name) for name in same[0]))
            yield cause([event], f"{' and '.join(places[:3])} are one layer: they have the same weights.",
                        "Make each: ModuleList([Linear(8, 8) for _ in range(3)]), not [Linear(8, 8)] * 3.",
                        site=places[0], places=places[1:])  # fmt: skip


def _differ_by_a_number(names: list[str]) -> bool:
    """Return whether names are the same but for one number in them.

    >>> _differ_by_a_number(["a.0.weight", "a.1.weight"]), _differ_by_a_number(["a.0.weight", "b.1.weight"])
    (True, False)
    """
    parts = [name.split(".") for name in names]
    if len(parts) < 2 or len({len(part) for part in parts}) > 1:
        return False
    apart = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    return len(apart) == 1 and all(part.isdigit() for part in apart[0])


@rule("softmax_hidden")
def softmax_hidden(history: RunHistory) -> Iterator[Finding]:
    """A softmax feeds another layer: its outputs sum to one, so that hardly any signal and gradient is left."""
    found = [e for e in events(history, "backward") if e.data.get("softmax_before")]
    if found and len(found) > len(events(history, "backward")) / 2:
        names = [owner(name) for name in found[0].data["softmax_before"]]
        yield cause(found, f"{names[0]} is given the output of a softmax, which sums to one.",
                    "Use relu between layers; softmax belongs to the output.", site=names[0],
                    places=[*names[1:], *lines_of_activation(history, "Softmax")],
                    code=found[0].data.get("made_at", ""))  # fmt: skip


@rule("dropout_in_evaluation")
def dropout_in_evaluation(history: RunHistory) -> Iterator[Finding]:
    """A dropout is active inside a module in evaluation mode: the function was not told the mode."""
    found = events(history, "dropout")
    if found:
        yield cause(found, f"A dropout of {text.number(found[0].data['p'])} is active in {found[0].name}, which is in "
                    "evaluation mode.", "Give it training=self.training, or use nn.Dropout.",
                    site=found[0].data.get("site", ""))  # fmt: skip


@rule("evaluation_inputs_differ")
def evaluation_inputs_differ(history: RunHistory, *, factor: float = 6.0) -> Iterator[Finding]:
    """Evaluation is given inputs of another scale than training: std or mean differ by `factor`."""
    by_mode: dict[tuple[str, bool], list[tuple[Any, dict[str, Any]]]] = {}
    for event in events(history, "batch"):
        given = event.data.get("input", {})
        if "std" in given and str(given.get("dtype", "")).startswith(("float", "bf")):
            evaluation = str(event.data.get("mode", "")).startswith("eval")
            if evaluation or event.data.get("mode") == "train":
                by_mode.setdefault((event.name, evaluation), []).append((event, given))
    for (name, evaluation), tested in by_mode.items():
        trained = by_mode.get((name, False))
        if not evaluation or not trained or trained[0][1]["shape"][1:] != tested[0][1]["shape"][1:]:
            continue
        a, b = (float(np.median([g["std"] for _, g in part])) for part in (trained, tested))
        shift = abs(np.median([g["mean"] for _, g in trained]) - np.median([g["mean"] for _, g in tested]))
        if min(a, b) > 0 and (max(a, b) > factor * min(a, b) or shift > factor * max(a, b)):
            yield cause([e for e, _ in tested], f"Inputs have a std of {text.number(a)} in training and of "
                        f"{text.number(b)} in evaluation (means {text.number(float(shift))} apart).",
                        "Prepare both in the same way, with the training data's mean and std.", site=":input",
                        train=a, evaluation=b)  # fmt: skip


@rule("worker_states_equal")
def worker_states_equal(history: RunHistory) -> Iterator[Finding]:
    """Workers of a data loader begin with the same random state: they augment in the same way."""
    found = [e for e in events(history, "workers") if len(e.data["states"]) > 1 and len(set(e.data["states"])) == 1]
    if found:
        count = len(found[0].data["states"])
        yield cause(found, f"All {count} workers of the loader begin with the same random state.",
                    "Seed by the worker in worker_init_fn: np.random.seed(torch.initial_seed() % 2**32).",
                    workers=count)  # fmt: skip


@rule("ranks_train_apart", severity="error")
def ranks_train_apart(history: RunHistory) -> Iterator[Finding]:
    """Ranks train the same model on different data, and no parameter is the same on any two: none is synchronised."""
    if len(history.snapshot.ranks) < 2:
        raise NoData("only one rank recorded")
    weights = _first_of_each_rank(events(history, "parameters"), _sizes)
    batches = _first_of_each_rank(events(history, "batch"), lambda e: e.data.get("fingerprint"))
    if len(weights) < 2 or len(set(batches.values())) < len(weights) or len({tuple(w) for w in weights.values()}) > 1:
        return
    names = next(iter(weights.values()))
    equal = [name for name in names if len({w[name] for w in weights.values()}) < len(weights)]
    if names and not equal:
        yield cause(events(history, "optimizer")[:1], f"{len(weights)} ranks train {text.counted(len(names), 'tensor')}"
                    " of the same names and shapes on different batches, and none of them is equal on any two ranks.",
                    "Wrap the model: DistributedDataParallel(model), which also gives all ranks the same weights.",
                    site=owner(next(iter(names))), ranks=len(weights))  # fmt: skip


@rule("ranks_repeat_data")
def ranks_repeat_data(history: RunHistory, *, least: int = 3) -> Iterator[Finding]:
    """All ranks train the same parameters on the same batches, `least` or more: nothing is gained by having several."""
    if len(history.snapshot.ranks) < 2:
        raise NoData("only one rank recorded")
    given: dict[int, list[str]] = {}
    for event in events(history, "batch"):
        if event.data.get("mode") == "train" and event.data.get("fingerprint"):
            given.setdefault(event.rank, []).append(event.data["fingerprint"])
    first = {tuple(marks[:least]) for marks in given.values()}
    weights = {str(found) for found in _first_of_each_rank(events(history, "parameters"), _sizes).values()}
    if len(given) > 1 and len(first) == 1 and len(next(iter(first))) >= least and len(weights) == 1:
        line = next((e.data.get("made_at") or e.code for e in events(history, "epoch")), "")
        yield cause(events(history, "batch")[:1], f"The first {least} batches are the same on all {len(given)} ranks.",
                    "Give the loader a DistributedSampler, or each rank its own part of the data.", code=line,
                    ranks=len(given))  # fmt: skip


def _first_of_each_rank(found: list[TrainingEvent], read: Callable[[TrainingEvent], Any]) -> dict[int, Any]:
    first: dict[int, Any] = {}
    for event in found:
        if event.rank not in first:
            first[event.rank] = read(event)
    return first


def _sizes(event: TrainingEvent) -> dict[str, tuple[float, ...]]:
    """Return the statistics of parameters that are not constant, by name and shape."""
    listed = zip(event.data.get("names", ()), event.data.get("shapes", ()), event.data.get("weight", ()), strict=False)
    return {f"{name} {shape}": tuple(numbers) for name, shape, numbers in listed if numbers[2]}
