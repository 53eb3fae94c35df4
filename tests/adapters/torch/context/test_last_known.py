"""What the end of a training tells of models that are gone by then."""

from __future__ import annotations

import gc
import json

import torch
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.context.last_known import LastKnown


def totals_after(program, folder):
    """Run a program in which a model lives and dies; return what the end tells."""
    with tt.watch(nn.Identity(), to=folder, context=True) as tap:
        program()
        gc.collect()
    rows = tap.run.events().to_pylist()
    return json.loads(next(row["data"] for row in rows if row["kind"] == "totals"))


def train(held, *, detached=False):
    """Train a model that nobody holds afterwards."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    with tt.watch(model, context=True):
        optimizer = torch.optim.SGD(held(model), lr=0.1)
        for _ in range(4):
            out = model(torch.randn(6, 4))
            loss = out.new_tensor(1.0, requires_grad=True) * 1.0 if detached else out.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.randn(6, 4))


def test_parameters_that_no_optimizer_holds_outlive_their_model(tmp_path):
    """A model that died before the end is told of: what was trained, what was not, how it was evaluated."""
    told = totals_after(lambda: train(lambda model: model[0].parameters()), tmp_path / "a")
    assert (told["trainable"], told["held"], told["untrained"]) == (4, 2, ["2.weight", "2.bias"])
    assert told["eval_in_train_mode"] > 0


def test_a_loss_that_reaches_nothing_is_told_of_after_the_model_died(tmp_path):
    """Parameters that never got a gradient are named although they are gone; all steps count as looked at."""
    told = totals_after(lambda: train(lambda model: model.parameters(), detached=True), tmp_path / "a")
    assert (told["unreached_count"], told["held"]) == (4, 4)
    assert told["steps_without_gradients"] == told["steps_looked_at"] == 4


def test_only_parameters_that_stay_are_in_no_model():
    """What is made anew for each loss, as a perturbation is, is no forgotten layer; what comes again is one."""
    known = LastKnown(list)
    kept = nn.Parameter(torch.zeros(3))
    for _ in range(3):
        known.reached_without_model([kept, nn.Parameter(torch.zeros(2))])
    assert known.totals({}, {})["unregistered"] == [[3]]
    assert known.totals({id(kept): None}, {})["unregistered"] == []
