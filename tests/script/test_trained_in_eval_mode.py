"""Models that are trained in evaluation mode: the steps are steps of training, and their losses are training's."""

import pytest
from tests.script.conftest import ours

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(64, 4)
y = x.sum(1, keepdim=True)
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.05)
def train(batch=x, target=y, step=True):
    loss = nn.functional.mse_loss(net(batch), target)
    loss.backward()
    if step:
        opt.step()
        opt.zero_grad()
        print(loss.item())
def evaluate():
    with torch.no_grad():
        nn.functional.mse_loss(net(x), y)
"""
LOOPS = {
    "from the start": ("net.eval()\nfor i in range(20): train()", 20, 0),
    "left in it": ("for e in range(4):\n    for i in range(5): train()\n    net.eval()\n    evaluate()", 20, 4),
    "evaluated by turns": ("net.eval()\nfor e in range(10):\n    train()\n    evaluate()", 10, 10),
    "by a closure": (
        "net.eval()\ndef closure():\n    opt.zero_grad()\n    loss = nn.functional.mse_loss(net(x), y)\n"
        "    loss.backward()\n    return loss\nfor i in range(8):\n    print(opt.step(closure).item())", 8, 0,
    ),
    "by LBFGS": (
        "net.eval()\nopt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)\n"
        "def closure():\n    opt.zero_grad()\n"
        "    loss = nn.functional.mse_loss(net(x), y)\n    loss.backward()\n    return loss\n"
        "for i in range(8):\n    print(opt.step(closure).item())", 8, 0,
    ),
}  # fmt: skip


def losses(run, name):
    return [row["value"] for row in run.metrics().to_pylist() if row["name"] == name]


@pytest.mark.parametrize("loop", LOOPS)
def test_its_steps_are_training(scripts, loop):
    """A step with a backward and an optimizer's step is one of training, with its loss, whatever the mode."""
    text, trained, evaluated = LOOPS[loop]
    done, run = scripts.observe(HEAD + text)
    phases = {(row["step"], row["phase"]) for row in run.table(columns=["step", "phase"]).to_pylist()}
    assert sorted(phases) == sorted([(i, "train") for i in range(trained)] + [(i, "eval") for i in range(evaluated)])
    assert losses(run, "loss") == pytest.approx([float(line) for line in done.stdout.split()])
    told = next(line for line in ours(done) if "records" in line)
    assert f"loss {losses(run, 'loss')[0]:.3g} → {losses(run, 'loss')[-1]:.3g}" in told


def test_micro_batches_are_one_step(scripts):
    """Once a model was seen to be trained in evaluation mode, its micro-batches are one step."""
    _, run = scripts.observe(HEAD + "net.eval()\nfor i in range(6):\n    train(step=False)\n    train()")
    steps = {(row["step"], row["phase"]) for row in run.table(columns=["step", "phase"]).to_pylist()}
    assert {step for step, phase in steps if phase == "train"} == set(range(6))
    assert len([step for step, phase in steps if phase == "eval"]) <= 1  # the first call, when nothing was known


def test_the_mode_is_still_a_finding(scripts):
    """That the model is in evaluation mode is named, at a line of the script and of nothing else."""
    _, run = scripts.observe(HEAD + LOOPS["from the start"][0], process=True)
    (found,) = [finding for finding in run.findings() if finding.rule == "trained_in_eval_mode"]
    assert {place.rpartition(":")[0] for place in (found.code, *found.places)} == {"script.py"}


def test_gradients_without_an_optimizer_are_evaluation(scripts):
    """A gradient that nobody steps on, as of an attack or a saliency map, trains nothing."""
    text = "net.eval()\nfor i in range(4):\n    given = x.clone().requires_grad_()\n    net(given).sum().backward()"
    _, run = scripts.observe(HEAD + text)
    assert {row["phase"] for row in run.table(columns=["phase"]).to_pylist()} == {"eval"}
