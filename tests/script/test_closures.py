"""`optimizer.step(closure)`: parameters, updates, gradients and findings are those of the closure's own step."""

import json

import pytest

HEAD = """
import json
import torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(16, 4)
y = x.sum(1, keepdim=True)
truth = []
class Noted:
    def __init__(self, model):
        self.model, self.before = model, model.weight.detach().clone()
    def __enter__(self):
        pass
    def __exit__(self, *error):
        weight = self.model.weight.detach()
        told = self.before, weight - self.before, self.model.weight.grad
        truth.append([tensor.norm().item() for tensor in told])
def evaluation(model):
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
def evaluate(optimizer, model, reset=True):
    def closure():
        if reset:
            optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss
    return closure
net = nn.Linear(4, 1)
"""
SGD = """
opt = torch.optim.SGD(net.parameters(), lr=0.1)
"""
LOOPS = {
    "a closure": SGD + """
for i in range(5):
    with Noted(net):
        opt.step(evaluate(opt, net))
""",
    "reset outside the closure": SGD + """
for i in range(5):
    opt.zero_grad()
    with Noted(net):
        opt.step(evaluate(opt, net, reset=False))
""",
    "evaluated before and between": SGD + """
evaluation(net)
for i in range(5):
    with Noted(net):
        opt.step(closure=evaluate(opt, net))
    evaluation(net)
    evaluation(net)
""",
    "LBFGS": """
opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
for i in range(4):
    with Noted(net):
        opt.step(evaluate(opt, net))
""",
    "one optimizer after another": SGD + """
for i in range(3):
    with Noted(net):
        opt.step(evaluate(opt, net))
opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
for i in range(3):
    with Noted(net):
        opt.step(evaluate(opt, net))
""",
    "a closure and none by turns": SGD + """
for i in range(6):
    with Noted(net):
        opt.step(evaluate(opt, net)) if i % 2 else (evaluate(opt, net)(), opt.step())
""",
    "a closure that only returns the loss": SGD + """
for i in range(5):
    with Noted(net):
        loss = evaluate(opt, net)()
        opt.step(lambda: loss)
""",
    "the model is called before the closure": SGD + """
for i in range(5):
    with torch.no_grad():
        hint = frozen(x)
    with Noted(net):
        opt.step(evaluate(opt, net))
""".replace("for i", "frozen = nn.Linear(4, 4).eval()\nfor i", 1),
}  # fmt: skip


def series(run, site, phase="train"):
    columns = ["step", "phase", "site", "port", "l2"]
    rows = [row for row in run.table(columns=columns).to_pylist() if row["phase"] == phase]
    return [
        row["l2"] for port in ("param", "update", "grad") for row in rows if (row["site"], row["port"]) == (site, port)
    ]


@pytest.mark.parametrize("loop", LOOPS)
def test_parameters_are_those_of_their_step(scripts, loop):
    """The parameter before the step, what it changed, and its gradient are recorded at that step, and at no other."""
    done, run = scripts.observe(HEAD + LOOPS[loop] + "print(json.dumps(truth))", "--watch", "recommended")
    truth = json.loads(done.stdout)
    site = "net.weight" if "frozen" in LOOPS[loop] else "weight"
    assert series(run, site) == pytest.approx([row[i] for i in range(3) for row in truth], rel=1e-4)


def test_two_optimizers_whose_closures_call_no_model(scripts):
    """Optimizers that only get the loss by a closure share the step that computed it, from the second step on."""
    text = """
    first, second = torch.optim.SGD([net.weight], lr=0.1), torch.optim.SGD([net.bias], lr=0.1)
    for i in range(6):
        net.zero_grad()
        with Noted(net):
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            first.step(lambda: loss)
            second.step(lambda: loss)
    print(json.dumps(truth))
    """
    done, run = scripts.observe(
        HEAD + "\n".join(line.strip("\n")[4:] for line in text.splitlines()), "--watch", "recommended"
    )
    truth = json.loads(done.stdout)
    assert series(run, "weight") == pytest.approx([row[i] for i in range(3) for row in truth], rel=1e-4)
    rows = run.table(columns=["step", "site", "port"]).to_pylist()
    of_bias = [(row["step"], row["port"]) for row in rows if row["site"] == "bias" and row["step"] > 1]
    assert sorted(of_bias) == [(step, port) for step in range(2, 6) for port in ("grad", "param", "update")]


CLASSIFIER = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
x = torch.randn(256, 20)
y = (x @ torch.randn(20, 4)).argmax(1)
def closure():
    RESET
    loss = nn.functional.cross_entropy(net(x), y)
    loss.backward()
    return loss
opt = OPTIMIZER
for i in range(STEPS):
    OUTSIDE
    opt.step(closure)
"""


def closures(optimizer, steps, inside=True):
    reset = ("opt.zero_grad()", "pass") if inside else ("pass", "opt.zero_grad()")
    text = CLASSIFIER.replace("OPTIMIZER", f"torch.optim.{optimizer}").replace("STEPS", str(steps))
    return text.replace("RESET", reset[0]).replace("OUTSIDE", reset[1])


@pytest.mark.parametrize("inside", [True, False], ids=["reset inside", "reset outside"])
@pytest.mark.parametrize("optimizer", ["SGD(net.parameters(), lr=0.1)", "Adam(net.parameters(), lr=0.01)"])
def test_a_healthy_closure_is_not_reported(scripts, optimizer, inside):
    """Where gradients are reset, in the closure or before it, does not matter."""
    _, run = scripts.observe(closures(optimizer, 80, inside))
    assert run.findings().at_least("warning") == []


def test_a_healthy_lbfgs_is_not_reported(scripts):
    """LBFGS resets and computes gradients many times in a step, which throws nothing away."""
    _, run = scripts.observe(closures("LBFGS(net.parameters())", 12))
    assert run.findings().at_least("warning") == []


def test_a_high_rate_with_a_closure_is_named(scripts):
    """What diverges is told from a poor initialisation, and the error is one."""
    _, run = scripts.observe(closures("SGD(net.parameters(), lr=1e3)", 40))
    first = run.findings()[0]
    assert (first.rule, first.severity) == ("learning_rate_high", "error")


def test_gradients_that_a_closure_never_resets_are_reported(scripts):
    """A closure without zero_grad adds up gradients, as a loop without it does."""
    text = closures("SGD(net.parameters(), lr=0.01)", 40).replace("opt.zero_grad()", "pass")
    _, run = scripts.observe(text)
    assert "gradients_not_reset" in {finding.rule for finding in run.findings().at_least("error")}
