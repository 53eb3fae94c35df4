"""The origin of a NaN or an infinity is named: module, operation, line, inputs and why."""

import copy
import re

import pytest
import torch
from torch import nn

import tensortap as tt


class Lambda(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def net(function, width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), Lambda(function), nn.Linear(width, 2)
    )


FAULTS = {
    "log of zero": (lambda x: torch.relu(x).log(), "log", "log of 0"),
    "log of a negative": (lambda x: torch.log(x), "log", "log of a negative number"),
    "division by zero": (lambda x: 1 / torch.relu(x), "rdiv", "division by 0"),
    "zero by zero": (lambda x: torch.relu(x) / torch.relu(x), "div", "0 divided by 0"),
    "exp": (lambda x: (1e4 * x).exp(), "exp", "exceeds the range of float32"),
    "root": (lambda x: x.sqrt(), "sqrt", "square root of a negative number"),
    "masked softmax": (lambda x: x.masked_fill(x == x, float("-inf")).softmax(-1), "softmax", "only −inf"),
    "mask by multiplying": (lambda x: x + (x > 0) * float("-inf"), "mul", "0 times infinity"),
    "zero by a masked value": (
        lambda x: torch.relu(x) @ x.masked_fill(x == x, float("-inf")).T,
        "matmul",
        "0 times infinity",
    ),
    "overflow": (lambda x: (1e30 * x) @ (1e30 * x).T @ x, "matmul", "overflow in float32"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_forward_fault_is_named(name):
    """The operation, the module that ran it, its line and the cause are found."""
    function, operation, why = FAULTS[name]
    origin = tt.locate_nonfinite(net(function), torch.randn(4, 8))
    assert (origin.direction, origin.site, origin.module) == ("forward", "3", "Lambda")
    assert operation in origin.operation
    assert why in origin.why
    assert "test_origin.py" in origin.source
    assert all(seen.summary.nan == 0 for seen in origin.inputs)


def test_a_half_precision_overflow_gives_the_value_that_did_not_fit():
    """A float16 matmul that overflows is told with the value and the limit."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    with torch.no_grad():
        model[1].weight.fill_(1e3)
    origin = tt.locate_nonfinite(model, torch.full((2, 8), 300.0).half())
    assert origin.operation == "linear"
    assert "overflow in float16" in origin.why and "6.55e4" in origin.why


def test_an_overflow_of_what_was_large_already_points_upstream():
    """Where what came in was huge, the cause says how large, and that it lies earlier; else it does not."""
    product = nn.Sequential(Lambda(lambda x: x * 5e24), Lambda(lambda x: x @ x.T))
    assert re.search(r"already as large as .*e24: look upstream$", tt.locate_nonfinite(product, torch.ones(4, 8)).why)
    sudden = nn.Sequential(Lambda(lambda x: (x * 3e4).half()), Lambda(lambda x: x @ x.T))
    assert "upstream" in tt.locate_nonfinite(sudden, torch.ones(4, 8)).why
    many = nn.Sequential(Lambda(lambda x: (x.abs() + 90).half()), Lambda(lambda x: x @ x.T))
    why = tt.locate_nonfinite(many, torch.ones(4, 80)).why
    assert why.startswith("overflow in float16") and "upstream" not in why


class Masked(nn.Module):
    """Attention whose mask of −inf comes from outside, as PyTorch's own masks do."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.scale = nn.Linear(8, 8), scale

    def forward(self, x, mask):
        q = self.fc(x) * self.scale
        return (q @ q.T + mask).softmax(-1) @ x


class GivesMask(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.drop, self.attention = nn.Identity(), Masked(scale)

    def forward(self, x):
        return self.attention(x, mask=self.drop(nn.Transformer.generate_square_subsequent_mask(4)))


def test_a_module_that_was_given_a_mask_is_found():
    """A mask of −inf among the inputs hides no fault, and is none, wherever it passes through."""
    origin = tt.locate_nonfinite(GivesMask(1e25), torch.ones(4, 8))
    assert (origin.site, origin.operation) == ("attention", "matmul") and "overflow in float32" in origin.why
    assert tt.locate_nonfinite(GivesMask(1.0), torch.ones(4, 8)) is None
    found = []
    with tt.watch(model := GivesMask(1e25), "attention", on_nonfinite=found.append, to=tt.Memory()) as tap:
        model(torch.ones(4, 8))
        tap.step()
    assert [(origin.site, origin.operation) for origin in found] == [("attention", "matmul")]


def test_a_module_that_masks_is_not_blamed():
    """A module that returns −inf on purpose is passed over, and what goes wrong after it is found."""

    def mask(x):
        return x.masked_fill(x > 0, float("-inf")) * 0.5

    healthy = net(lambda x: mask(x).softmax(-1))
    masking = nn.Sequential(nn.Linear(8, 8), Lambda(mask), nn.Softmax(-1), Lambda(lambda x: x))
    assert tt.locate_nonfinite(healthy, torch.randn(4, 8)) is None
    x = torch.linspace(-3, 3, 32).reshape(4, 8)
    assert tt.locate_nonfinite(masking, x) is None
    masking[3] = Lambda(lambda x: (x - 1).log())
    assert tt.locate_nonfinite(masking, x).site == "3"


def test_broken_weights_are_the_cause():
    """A parameter that is not finite is blamed, not the operation."""
    model = net(lambda x: x)
    with torch.no_grad():
        model[4].weight[0, 0] = float("nan")
    assert tt.locate_nonfinite(model, torch.randn(4, 8)).why == "its parameter weight is not finite"


@pytest.mark.parametrize(
    ("function", "node", "why"),
    [
        (lambda x: (x - x).pow(2).sum(-1, keepdim=True).sqrt() + x, "SqrtBackward0", "sqrt at 0"),
        (lambda x: (x * 0).pow(0.5) + x, "PowBackward0", "power at 0"),
    ],
)
def test_a_backward_fault_is_named(function, node, why):
    """A gradient that becomes non-finite is traced to the node, the module and the forward line."""
    origin = tt.locate_nonfinite(net(function), torch.randn(4, 8))
    assert (origin.direction, origin.site, origin.operation) == ("backward", "3", node)
    assert why in origin.why
    assert "test_origin.py" in origin.source


def test_a_healthy_model_has_no_origin():
    """Nothing is found where nothing is wrong."""
    assert tt.locate_nonfinite(net(torch.tanh), torch.randn(4, 8)) is None


def test_the_model_is_left_as_it_was():
    """Weights, buffers, gradients, random state, hooks and modes are the same after looking."""
    model = net(lambda x: torch.relu(x).log())
    before = copy.deepcopy(model.state_dict())
    seed = torch.get_rng_state()
    tt.locate_nonfinite(model, torch.ones(4, 8))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(seed, torch.get_rng_state())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_second_call_of_a_reused_module_is_the_origin():
    """A module that is fine the first time and not the second is named with its call."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Lambda(lambda x: x.log())

        def forward(self, x):
            return self.inner(self.inner(x))

    origin = tt.locate_nonfinite(Twice(), torch.full((3,), 1.0))
    assert (origin.site, origin.operation, origin.why) == ("inner", "log", "log of 0")


def test_printed_it_is_the_answer():
    """The text names operation, site, cause, line, what went in and what came out."""
    text = str(tt.locate_nonfinite(net(lambda x: torch.relu(x).log()), torch.randn(4, 8)))
    for part in ("log in 3 (Lambda), forward", "why     log of 0", "line ", "given ", "gave "):
        assert part in text


def test_a_step_of_the_users_own_is_run():
    """A function that runs a step is used as it is, loss outside the model included."""
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def step():
        loss = (model(x) * 0).sum().sqrt()
        loss.backward()
        return loss

    origin = tt.locate_nonfinite(model, step)
    assert origin.direction == "backward" and origin.site == "(outside the model)"
