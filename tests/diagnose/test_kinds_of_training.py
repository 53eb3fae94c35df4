"""Healthy trainings of other kinds than one model and one falling loss: what rules leave out of account, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from tensortap.adapters.torch.context.graph import LossGraph
from tensortap.adapters.torch.context.loop import LoopState
from tensortap.diagnose.rules.activations import _last_of_each_model
from tensortap.diagnose.rules.context.labels import labels_one_class
from tensortap.diagnose.rules.context.loops import graph_detached
from tensortap.diagnose.rules.context.optimizers import frozen, learning_rate_low, optimizer_incomplete, optimizer_stale
from tensortap.diagnose.rules.context.shared import gets_on, goes_wrong, needs_not_fall
from tensortap.diagnose.training import TrainingEvent, prefixed_types
from tensortap.types import Place


class Events:
    """A history that has events, metrics and places, and nothing else."""

    def __init__(self, *found: tuple[str, str, dict[str, Any]], loss: Any = (), ran: tuple[str, ...] = ()) -> None:
        given = found if any(kind == "model" for kind, _, _ in found) else (("model", "", {}), *found)
        self.found = [TrainingEvent(0, 0, kind, name, "train.py:1", data) for kind, name, data in given]
        self.metrics = {"loss": (np.arange(len(loss)), np.asarray(loss, float))} if len(loss) else {}
        self.places = [Place(site, "output", "", "") for site in ran]
        self.modules = dict.fromkeys(ran, "")

    def events(self, kind: str) -> list[TrainingEvent]:
        """Return the events of a kind."""
        return [event for event in self.found if event.kind == kind]

    def sites(self, *_: str) -> list[Any]:
        """Return the places as sites."""
        return [SimpleNamespace(place=place) for place in self.places]


def totals(**known: Any) -> tuple[str, str, dict[str, Any]]:
    return "totals", "", {"backwards": 40, "steps": 40, "calls_per_backward": {"1": 40}, **known}


def found_by(rule: Any, history: Events) -> list[Any]:
    """Return the severities that a rule gives, with its own where it leaves it empty."""
    return [finding.severity or rule.severity for finding in rule.function(history)]


SUPERVISED = ("loss", "cross_entropy", {"train": True})
SQUARED = ("loss", "mse_loss", {"train": True})
FLAT = np.ones(40)


@pytest.mark.parametrize(("history", "free"), [
    (Events(totals(), SUPERVISED), False),
    (Events(totals(), SQUARED), False),
    (Events(totals()), True),  # a policy gradient, or a critic
    (Events(totals(calls_per_backward={str(n): 1 for n in range(9, 19)}), SUPERVISED), True),  # episodes
    (Events(totals(calls={"q": {"train": 40}, "target": {"train_no_grad": 40}}), SQUARED), True),  # Q-learning
    (Events(totals(calls={"m": {"train": 40, "train_no_grad": 40}}), SUPERVISED), False),  # an evaluation
])  # fmt: skip
def test_what_need_not_fall(history, free):
    """A loss that is no error on data, or whose targets are a model's own answers, may stay where it is."""
    assert needs_not_fall(history) is free
    history.metrics = {"loss": (np.arange(40), FLAT)}
    assert goes_wrong(history) is not free
    assert not gets_on(history)


def test_a_loss_that_is_not_finite_goes_wrong_in_any_training():
    """Also a policy's loss must be finite."""
    assert goes_wrong(Events(totals(), loss=[*FLAT, np.nan]))


def test_a_loss_that_falls_to_a_fifth_gets_on():
    """A tenth of the beginning is enough, half of it is not."""
    assert gets_on(Events(loss=np.linspace(1, 0.05, 40)))
    assert not gets_on(Events(loss=np.linspace(1, 0.5, 40)))


def test_modules_of_several_models_have_their_names():
    """Where sites begin with a model's name, so do the classes of modules; one model alone is left to `run.json`."""
    parts = [{"path": "D.0", "type": "Linear"}, {"path": "D", "type": "Sequential"}]
    models = Events(("model", "G", {"class": "Net"}), ("model", "D", {"class": "Sequential", "modules": parts}))
    assert prefixed_types(models.events("model")) == {"G": "Net", "D": "Sequential", "D.0": "Linear"}
    assert prefixed_types(Events().events("model")) == {}


def test_each_model_has_an_output_of_its_own():
    """The last module of a generator is as much an output as that of its critic."""
    history = Events(("model", "G", {}), ("model", "D", {}), ran=("G.0", "G.1", "D.0", "D.1"))
    assert [str(site.place.site) for site in _last_of_each_model(history)] == ["G.1", "D.1"]
    assert [str(site.place.site) for site in _last_of_each_model(Events(ran=("0", "1")))] == ["1"]


@pytest.mark.parametrize(("unreached", "severity"), [
    (["pooler.weight", "pooler.bias"], "info"),  # its output is used by nobody
    (["embed.weight", "encoder.weight"], "error"),  # the way is cut, for all that comes before
])  # fmt: skip
def test_a_side_branch_is_no_cut(unreached, severity):
    """A layer that nobody asks for its output is noted; a first layer that never learns is an error."""
    names = [name for name in ("embed.weight", "encoder.weight", "head.weight") if name not in unreached]
    history = Events(
        totals(unreached=unreached, unreached_count=2, held=6), ("parameters", "Adam", {"names": names}),
        ran=("embed", "encoder", "pooler", "head"),
    )  # fmt: skip
    assert found_by(graph_detached, history) == [severity]


@pytest.mark.parametrize(("untrained", "severity"), [("body.weight", "info"), ("head.weight", "error")])
def test_training_the_head_alone_is_fine_tuning(untrained, severity):
    """Whoever gives the optimizer the head alone means it; whoever leaves out the head does not."""
    called = ("loss", "cross_entropy", {"train": True, "produced_by": "head.weight"})
    history = Events(totals(untrained=[untrained], untrained_count=1, trainable=4), called)
    assert found_by(optimizer_incomplete, history) == [severity]


@pytest.mark.parametrize(("holds", "found"), [({"foreign": 1, "held": 0}, []), ({"foreign": 2, "held": 0}, ["error"])])
def test_a_picture_may_be_optimised(holds, found):
    """An optimizer of one tensor that is in no model changes a picture, as style transfer does."""
    history = Events(totals(untrained=["conv.weight"], untrained_count=1), ("holds", "Adam", holds))
    assert found_by(optimizer_stale, history) == found


@pytest.mark.parametrize(("last_trained", "found"), [(0.95, []), (0.2, ["warning"])])
def test_adapters_leave_the_head_frozen(last_trained, found):
    """A frozen head is meant where kernels are trained down to the last layers, and not where only the first are."""
    data = {"frozen": ["head.weight"], "modules": [{"path": "head", "type": "Linear"}], "frozen_count": 10,
            "parameters": 20, "last_trained": last_trained}  # fmt: skip
    assert found_by(frozen, Events(("model", "", data))) == found


@pytest.mark.parametrize(("last", "found"), [("Div", []), ("Addmm", ["error"])])
def test_the_first_of_similarities_is_the_right_one(last, found):
    """Contrastive losses have only labels of zero; a linear layer that is given only zeros learns nothing."""
    target = {"classes": 1, "most": 0, "counts": {"0": 16}}
    calls = [("loss", "cross_entropy", {"train": True, "target": target, "operations": [last]})] * 4
    assert found_by(labels_one_class, Events(*calls)) == found


@pytest.mark.parametrize(("rate", "found"), [(1e-4, []), (1e-9, ["warning"])])
def test_a_rate_that_still_rises_is_not_too_low(rate, found):
    """In the first steps of a warm-up the rate is small, and it is not meant to stay so."""
    moved = [("parameters", "Adam", {"shapes": [[4, 4]], "update": [1e-7]})] * 5
    rising = ("rate", "Adam", {"groups": [{"lr": rate, "before": 1e-8}]})
    assert found_by(learning_rate_low, Events(*moved, rising)) == found


def test_tables_are_added_and_kernels_are_factors():
    """The graph tells a table of positions from a kernel, and a memory that is read from a layer after a softmax."""
    x, kernel, table, memory = torch.randn(5, 4), *(nn.Parameter(torch.randn(4, 4)) for _ in range(3))
    names = {id(kernel): "kernel", id(table): "table", id(memory): "memory"}
    layer = nn.Linear(4, 4)
    names |= {id(layer.weight): "layer.weight", id(layer.bias): "layer.bias"}
    logits = x @ kernel + table.sum(0)
    read, given = functional.softmax(logits, 1) @ memory, layer(functional.softmax(logits, 1))
    graph = LossGraph(read.sum() + given.sum(), lambda p: names.get(id(p)))
    assert graph.multiplied == {"kernel", "memory", "layer.weight"}
    assert graph.softmax_before == ["layer.weight"]


def test_what_is_only_looked_through_is_not_trained_in_evaluation_mode():
    """A model in evaluation mode that no optimizer trains, as in style transfer, is no mistake."""
    loop = LoopState()
    record: Any = SimpleNamespace(number=0)
    for _ in range(6):
        loop.called("vgg", "eval", True)
        loop.before_step(record, True)
        loop.after_step(record)
    assert loop.totals(["vgg"])["trained_in_eval_mode"] == 6
    assert loop.totals([])["trained_in_eval_mode"] == 0
