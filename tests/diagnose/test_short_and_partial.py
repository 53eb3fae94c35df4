"""Healthy trainings that are short, or train a part only: what rules say of them is a remark."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diagnose.test_kinds_of_training import Events, found_by
from diagnose.test_programs_of_others import classes, noisy
from torch import nn
from torch.nn import functional

import tensortap as tt
from tensortap.diagnose.rules.context.chance import loss_at_chance
from tensortap.diagnose.rules.context.optimizers import scheduler_per_batch
from tensortap.diagnose.rules.gradients import _is_over
from tensortap.diagnose.rules.loss import _is_vague, _not_falling


def severities(run, rule):
    return [finding.severity for finding in run.findings(rule)]


@pytest.mark.parametrize(("labels", "spread", "found"), [
    (32, 0.02, ["warning"]),
    (8, 0.02, ["info"]),  # 480 labels
    (32, 0.8, ["info"]),  # nobody knows where it ends
])  # fmt: skip
def test_few_labels_show_no_chance(labels, spread, found):
    """A loss that stays at chance is a fault where enough labels were seen, and where it is known to stay there."""
    half = labels // 2
    loss = noisy(np.full(60, np.log(2)), spread)
    loss[-20:] += np.log(2) - loss[-20:].mean()
    assert found_by(loss_at_chance, Events(*classes({"0": half, "1": half}), loss=loss)) == found


@pytest.mark.parametrize(("prompted", "found"), [(True, ["info"]), (False, ["warning"])])
def test_a_prompt_may_teach_a_frozen_model_little(tmp_path, prompted, found):
    """Where the whole model is frozen, and a prompt is trained, the loss may stay at chance; a model's own may not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    prompt = nn.Parameter(torch.zeros(1, 8))
    for parameter in model.parameters():
        parameter.requires_grad_(not prompted)
    optimizer = torch.optim.SGD([prompt] if prompted else model.parameters(), 0.01)
    with tt.watch(model, context=True, to=tmp_path / "run") as tap:
        for _ in range(60):
            x, y = torch.randn(40, 8), torch.randint(2, (40,))
            loss = functional.cross_entropy(model(x + prompt), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tap.step(loss=loss.item())
    assert severities(tap.run, "loss_at_chance") == found


def test_a_bias_may_cancel_out(tmp_path):
    """In the difference of two outputs the last bias has no gradient: only a layer that has none at all is named."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, "**:grad", to=tmp_path / "run") as tap:
        for _ in range(6):
            better, worse = model(torch.randn(32, 4)).chunk(2)
            loss = functional.softplus(worse - better).sum()
            optimizer.zero_grad()
            loss.backward()
            model[2].bias.grad.zero_()  # what the difference leaves of it is rounding
            optimizer.step()
            tap.step(loss=loss.item())
    assert severities(tap.run, "all_zero") == []


@pytest.mark.parametrize(("values", "falls"), [
    (np.r_[5.0, 2.0, 0.5, np.full(47, 0.02), np.full(50, 0.01)], True),  # one loss weighs more than all others
    (np.r_[0.005, 5.0, 2.0, 0.5, np.full(46, 0.02), np.full(50, 0.01)], False),  # it comes back to what it was
    (np.full(100, 0.7), False),
])  # fmt: skip
def test_a_first_loss_far_above_the_others_hides_no_fall(values, falls):
    """A loss that falls by a half after a steep beginning does fall, however large the first ones were."""
    series = ("loss", np.arange(len(values)), noisy(values, 1e-4))
    assert (_not_falling(series, 0.001, 2.0) is None) is falls


@pytest.mark.parametrize(("held", "loss", "over"), [
    ([1, 1, 1, 0, 0, 0, 0, 0], np.linspace(1, 0.3, 40), True),
    ([1, 1, 1, 0, 0, 0, 0, 0], np.ones(40), False),  # and nothing came of it
    ([0, 0, 0, 0, 0, 1, 1, 1], np.linspace(1, 0.3, 40), False),
    ([1, 1, 1], np.linspace(1, 0.3, 40), False),  # nothing was seen after it
])  # fmt: skip
def test_an_explosion_that_is_over(held, loss, over):
    """Gradients that differ much at the very first steps are no fault where the loss falls."""
    assert _is_over(Events(loss=loss), np.array(held, bool), 3) is over


@pytest.mark.parametrize(("factor", "found"), [
    (lambda step: min(step / 10, (40 - step) / 30), []),  # warmed up from zero, then down to zero
    (lambda step: (40 - step) / 40, []),
    (lambda step: 0.7**step, ["error"]),  # nearly gone after ten steps
])  # fmt: skip
def test_a_rate_that_begins_at_zero_is_not_gone(tmp_path, factor, found):
    """A schedule for steps that warms up from zero is stepped at every batch, and rightly so."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with tt.watch(model, context=True, to=tmp_path / "run") as tap:
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        for _ in range(40):
            loss = functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8, 1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            tap.step(loss=loss.item())
    assert severities(tap.run, scheduler_per_batch) == found


@pytest.mark.parametrize(("moved", "found"), [(0.02, ["warning"]), (1e-4, [])])
def test_small_steps_learn_nothing_by_heart(moved, found):
    """A loss that steadily falls in the third epoch is on its way, where the weights have hardly moved."""
    calls = classes({"0": 8, "1": 8, "2": 8, "3": 8})
    steps = [("parameters", "SGD", {"shapes": [[4, 4]], "update": [moved]})] * 5
    history = Events(*calls, *steps, ("batch", "", {"mode": "train", "epoch": 3}),
                     loss=noisy(np.linspace(1.38, 1.34, 90), 0.005))  # fmt: skip
    assert found_by(loss_at_chance, history) == found


@pytest.mark.parametrize(("spread", "vague"), [(3.0, True), (0.1, False)])
def test_the_noise_of_tiny_batches_hides_a_fall(spread, vague):
    """Where a loss scatters by more than itself nobody can say that it does not fall."""
    values = np.abs(noisy(np.ones(120), spread))
    finding = _not_falling(("loss", np.arange(120), np.r_[values[:60], values[:60]]), 0.001, 2.0)
    assert _is_vague(finding, 2.0) is vague
