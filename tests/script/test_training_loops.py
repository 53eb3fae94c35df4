"""Training loops as people write them: their steps, the numbers of the steps, and whose losses there are."""

import pytest
from tests.script.conftest import ours

HEAD = """
import copy
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(8, 4), torch.randn(8, 1)
def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
"""
GAN = (
    HEAD
    + """
class Up(nn.Sequential): pass
class Judge(nn.Sequential): pass
netG, netD = Up(nn.Linear(4, 4)), Judge(nn.Linear(4, 1))
optD = torch.optim.SGD(netD.parameters(), lr=0.01)
optG = torch.optim.SGD(netG.parameters(), lr=0.01)
for i in range(3):
    optD.zero_grad()
    (netD(x).mean() + netD(netG(x).detach()).mean() + 100).backward()
    optD.step()
    optG.zero_grad()
    (netD(netG(x)).mean() - 100).backward()
    optG.step()
"""
)
TRAIN_LONGER = (
    HEAD
    + """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(12):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
"""
)
LBFGS = (
    HEAD
    + """
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
def closure():
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    return loss
for i in range(4):
    print(optimizer.step(closure).item())
"""
)
EVALUATED = (
    HEAD
    + """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def evaluate():
    model.eval()
    with torch.no_grad():
        for i in range(4):
            nn.MSELoss()(model(x), y)
    model.train()
for i in range(6):
    if i % 3 == 0:
        evaluate()
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
"""
)
EMA = (
    HEAD
    + """
model = net()
average = copy.deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(4):
    (model(x) - y).square().mean().backward()
    if i % 2:
        optimizer.step()
        optimizer.zero_grad()
(model(x) - y).square().mean().backward()       # left over: no step follows
with torch.no_grad():
    for i in range(2):
        average(x)
"""
)
BY_HAND = (
    HEAD
    + """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(2):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
for i in range(6):
    model.zero_grad()
    (model(x) - y).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
"""
)
MANY = (
    HEAD
    + """
models = [nn.Linear(4, 1) for _ in range(40)]
for i, model in enumerate(models):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (model(x).sum() * 0 + i).backward()
    optimizer.step()
"""
)

FOLDS = (
    HEAD
    + """
y = x.sum(1, keepdim=True)
for fold in range(3):
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for i in range(70):
        net.train()
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x[:6]), y[:6]).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net(x[6:])
"""
)


def steps(run, phase):
    return sorted(set(run.table(columns=["step"], phase=phase)["step"].to_pylist()))


def metrics(run):
    found = {}
    for row in run.metrics().to_pylist():
        found.setdefault(row["name"], {})[row["step"]] = row["value"]
    return found


def test_evaluation_has_its_own_numbers(scripts):
    """Training steps are the optimizer's steps, evaluation steps count apart, and so do their losses."""
    done, run = scripts.observe(EVALUATED)
    assert done.returncode == 0, done.stderr
    assert steps(run, "train") == list(range(6)) and steps(run, "eval") == list(range(8))
    assert {name: sorted(found) for name, found in metrics(run).items()} == {
        "loss": list(range(6)),
        "eval/loss": list(range(8)),
    }
    assert run.phases == ["eval", "train"]
    assert run.series("0", "std").steps.tolist() == list(range(6))
    assert run.series("0", "std", phase="eval").steps.tolist() == list(range(8))
    assert any("14 steps (6 train, 8 eval)" in line for line in ours(done))


def test_the_default_adds_parameters_at_a_few_steps(scripts):
    """Outputs come with every step; inputs, parameters, gradients and updates with the first and with powers of two."""
    done, run = scripts.observe(TRAIN_LONGER)
    rows = run.table(columns=["step", "port", "hist_offset"]).to_pylist()
    of = {port: sorted({row["step"] for row in rows if row["port"] == port}) for port in {row["port"] for row in rows}}
    few = [0, 1, 2, 3, 4, 8]
    assert of == {"output": list(range(12)), "input": few, "param": few, "grad": few, "update": few}
    assert sorted({row["step"] for row in rows if row["hist_offset"] is not None}) == few
    assert run.counts == {} and "not seen" not in done.stderr


def test_every_counts_the_steps_of_a_phase(scripts):
    """`--every 3` observes training steps 0 and 3, wherever evaluation comes between."""
    _, run = scripts.observe(EVALUATED, "--every", "3")
    assert steps(run, "train") == [0, 3] and steps(run, "eval") == [0, 3, 6]


def test_tensors_of_both_phases_are_kept(scripts):
    """A kept tensor of evaluation does not replace the one of training with the same number."""
    _, run = scripts.observe(EVALUATED, "--keep", "full", "--sites", "2:output")
    keys = [key for key, _ in run.tensors()]
    assert len(keys) == 14 and {key.phase for key in keys} == {"train", "eval"}
    train, evaluation = run.tensor("2", 5), run.tensor("2", 5, phase="eval")
    assert train.shape == evaluation.shape and (train != evaluation).any()


def test_show_shows_one_phase(scripts):
    """`show` draws training, says that there is evaluation, and draws that when asked."""
    scripts.observe(EVALUATED)
    shown = scripts.command("show", "run").stdout
    assert "6 train steps (0–5)" in shown and "--phase eval" in shown
    assert "8 eval steps (0–7)" in scripts.command("show", "run", "--phase", "eval").stdout


def test_rules_look_at_training(scripts):
    """Losses of evaluation are not judged as losses of training."""
    _, run = scripts.observe(
        EVALUATED
        + """
for i in range(40):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
model.eval()
for i in range(40):
    with torch.no_grad():
        nn.MSELoss()(model(x), y + 100 * i)
"""
    )
    assert {f.rule for f in run.findings()} & {"loss_spike", "loss_not_decreasing"} == set()


def test_a_gan_has_two_losses(scripts):
    """The losses of two optimizers are two series."""
    _, run = scripts.observe(GAN)
    found = metrics(run)
    assert {name: sorted(values) for name, values in found.items()} == {"loss/netD": [0, 2, 4], "loss/netG": [1, 3, 5]}
    assert min(found["loss/netD"].values()) > 0 > max(found["loss/netG"].values())


def test_metrics_carry_phase_and_owner(scripts):
    """The phase and the model of a loss are columns of the table, also for SQL."""
    _, run = scripts.observe(GAN + "netG.eval()\nwith torch.no_grad():\n    nn.MSELoss()(netG(x), x)\n")
    rows = run.metrics().to_pylist()
    assert [(row["name"], row["phase"], row["owner"]) for row in rows if row["step"] == 0] == [
        ("loss/netD", "train", "netD"),
        ("eval/loss", "eval", None),
    ]
    assert {row["owner"] for row in rows} == {"netD", "netG", None}


def test_a_nan_of_evaluation_is_found(scripts):
    """A NaN that only evaluation has is a finding, and says where it is."""
    _, run = scripts.observe(EVALUATED + "model.eval()\nwith torch.no_grad():\n    model(x * float('nan'))\n")
    (found,) = [finding for finding in run.findings() if finding.rule == "nonfinite"]
    assert "of evaluation" in found.message and found.steps.first == 8


def test_a_closure_is_one_step_with_its_first_loss(scripts):
    """LBFGS evaluates its closure several times in a step; the loss is the one that `step` returns."""
    done, run = scripts.observe(LBFGS)
    assert steps(run, "train") == [0, 1, 2, 3]
    assert list(metrics(run)["loss"].values()) == pytest.approx([float(line) for line in done.stdout.split()])


def test_an_average_is_evaluated_apart(scripts):
    """The first evaluation of an EMA copy begins a step of its own, also after micro-batches without a step."""
    _, run = scripts.observe(EMA)
    assert steps(run, "train") == [0, 1, 2] and steps(run, "eval") == [0, 1]
    rows = run.table(columns=["site", "port", "phase"]).to_pylist()
    called = [row for row in rows if row["site"].startswith("average") and row["port"] == "output"]
    assert {row["phase"] for row in called} == {"eval"}


def test_updates_by_hand_after_an_optimizer(scripts):
    """Updates that a script makes itself are steps, although it used an optimizer before."""
    _, run = scripts.observe(BY_HAND)
    assert len(steps(run, "train")) >= 7  # 2 by the optimizer, then 6, of which the first two may be one


def test_losses_of_models_that_are_not_watched(scripts):
    """Beyond the limit a model is not recorded, but its losses do not pile onto another model's step."""
    done, run = scripts.observe(MANY)
    assert any("32 models already" in line for line in ours(done))
    losses = [value for found in metrics(run).values() for value in found.values()]
    assert sorted(losses) == [float(i) for i in range(40)]


def test_folds_are_trainings_of_their_own(scripts):
    """Of a cross-validation each model has a name, its evaluation is a step apart, and no loss jumps between folds."""
    done, run = scripts.observe(FOLDS)
    assert steps(run, "train") == list(range(210)) and steps(run, "eval") == [0, 1, 2]
    rows = run.table(columns=["step", "phase", "site", "port", "shape"]).to_pylist()
    called = {(row["phase"], row["site"], row["shape"][0]) for row in rows if row["port"] == "output"}
    assert called == {(p, site, n) for p, n in (("train", 6), ("eval", 2)) for site in ("", "net-2", "net-3")}
    of_evaluation = {row["site"].partition(".")[0] for row in rows if (row["step"], row["phase"]) == (0, "eval")}
    assert not {"net-2", "net-3"} & of_evaluation and ("eval", "grad") not in {(r["phase"], r["port"]) for r in rows}
    assert any("net (Linear), net-2 (Linear), net-3 (Linear): 213 steps" in line for line in ours(done))
    assert {"loss_spike", "loss_not_decreasing"} & {finding.rule for finding in run.findings()} == set()
