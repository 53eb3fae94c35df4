"""What is seen: each port against plain hooks and autograd, by exact equality."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt


class Residual(nn.Module):
    """Uses its input twice, and has it used a third time outside the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), Residual(), nn.Linear(6, 3))


def caught(model: nn.Module, paths: list[str]) -> tuple[dict[str, Tensor], list[Any]]:
    """Inputs before and outputs after each module, by plain hooks that clone."""
    found: dict[str, Tensor] = {}
    handles = []
    for path in paths:
        module = model.get_submodule(path)

        def before(_: Any, args: Any, path: str = path) -> None:
            found[f"{path}:input"] = args[0].detach().clone()

        def after(_: Any, args: Any, out: Any, path: str = path) -> None:
            found[f"{path}:output"] = out.detach().clone()

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    return found, handles


PATHS = ["", "0", "1", "2", "2.branch", "2.branch.0", "2.branch.1", "3"]


def test_inputs_and_outputs_are_those_that_plain_hooks_see(watch, same):
    """Statistics of inputs and outputs equal, bit for bit, those of tensors cloned in the module's own hooks."""
    model, x = mlp(), torch.randn(5, 4)
    expected, _ = caught(model, PATHS)
    seen = watch(model, "**:{input,output}")
    model(x)
    seen.tap.step()
    assert {place: same(seen.one(place), tensor) for place, tensor in expected.items()} == dict.fromkeys(expected, True)
    assert sorted(seen.places) == sorted(expected)


def test_an_inplace_module_shows_its_input_as_it_was(watch, same):
    """The input of nn.ReLU(inplace=True) has its negative values still."""
    model, x = mlp(), torch.randn(5, 4)
    seen = watch(model, "1:input", "1:output")
    model(x)
    seen.tap.step()
    assert seen.one("1:input")["min"] < 0 == seen.one("1:output")["min"]
    assert same(seen.one("1:input"), model[0](x))


def test_gradients_of_outputs_are_those_of_autograd(watch, same):
    """What backward brings to each module's output equals autograd.grad for it."""
    torch.manual_seed(1)
    model, x = mlp(), torch.randn(5, 4)
    model[1].inplace = False
    kept: dict[str, Tensor] = {}
    for path in PATHS:
        model.get_submodule(path).register_forward_hook(lambda m, a, out, path=path: kept.__setitem__(path, out))
    seen = watch(model, "**:grad_output")
    loss = model(x).square().sum()
    loss.backward(retain_graph=True)
    seen.tap.step()
    for path in PATHS:
        (expected,) = torch.autograd.grad(loss, kept[path], retain_graph=True)
        assert same(seen.one(f"{path}:grad_output"), expected), path


def backward_hooks(model: nn.Module, paths: list[str]) -> dict[str, Tensor]:
    """Input gradients by PyTorch's own full backward hooks."""
    found: dict[str, Tensor] = {}
    for path in paths:
        model.get_submodule(path).register_full_backward_hook(
            lambda m, given, out, path=path: found.__setitem__(path, given[0].clone())
        )
    return found


def test_gradients_of_inputs_are_the_modules_own_share(watch, same):
    """A residual branch's grad_input leaves out what flows round the branch, as full backward hooks show it."""
    reference, x = mlp(), torch.randn(5, 4, requires_grad=True)
    reference[1].inplace = False
    model = mlp()
    model.load_state_dict(reference.state_dict())
    expected = backward_hooks(reference, PATHS)
    reference(x).square().sum().backward()
    seen = watch(model, "**:grad_input")
    model(x).square().sum().backward()
    seen.tap.step()
    assert {path: same(seen.one(f"{path}:grad_input"), expected[path]) for path in PATHS} == dict.fromkeys(PATHS, True)


class Both(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b + a.sum()


@pytest.mark.parametrize("shapes", [((4, 3), (4, 3)), ((4, 3), (3,)), ((4, 1), (1, 3)), ((2, 4, 3), (3,))])
def test_gradients_of_broadcast_inputs(watch, same, shapes):
    """Inputs that were broadcast get gradients of their own shape."""
    model = Both()
    a, b = (torch.randn(shape, requires_grad=True) for shape in shapes)
    seen = watch(model, ":grad_input")
    loss = model(a, b).square().sum()
    loss.backward()
    seen.tap.step()
    assert same(seen.one(":grad_input.a"), a.grad)
    assert same(seen.one(":grad_input.b"), b.grad)


def test_one_tensor_given_twice_has_both_shares_under_both_names(watch, same):
    """A tensor passed as two arguments is one place in the graph: each name shows the whole of it."""
    model, a = Both(), torch.randn(4, 3, requires_grad=True)
    seen = watch(model, ":grad_input")
    model(a, a).sum().backward()
    seen.tap.step()
    assert same(seen.one(":grad_input.a"), a.grad)
    assert same(seen.one(":grad_input.b"), a.grad)


def test_a_gradient_that_only_one_of_two_outputs_brings(watch, same):
    """Edges behind an output that the loss does not use are not waited for."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

    model, x = Two(), torch.randn(4, requires_grad=True)
    seen = watch(model, ":grad_input", ":grad_output")
    model(x)[1].sum().backward()
    seen.tap.step()
    assert same(seen.one(":grad_input"), torch.full((4,), 3.0))
    assert [str(r.place) for r in seen.records if r.place.port == "grad_output"] == [":grad_output[1]"]


def test_backward_twice_over_one_graph_is_recorded_twice(watch):
    """With retain_graph the second backward is a record of its own, for outputs and inputs."""
    model, x = Both(), torch.randn(3, 2, requires_grad=True)
    seen = watch(model, ":grad_output", ":grad_input.a")
    loss = model(x, x.detach()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    seen.tap.step()
    assert [r.call for r in seen.of(":grad_output")] == [0, 1]
    assert [r.call for r in seen.of(":grad_input.a")] == [0, 1]


def test_double_backward(watch, same):
    """Gradients taken with create_graph=True are seen and can be differentiated again."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    seen = watch(model, "0:grad_output", "1:grad_input")
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    seen.tap.step()
    assert seen.of("0:grad_output") and seen.of("1:grad_input")
    assert not seen.tap.counts.get("skipped_tensors")


class Point(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Data:
    hidden: Tensor
    rest: Any = None


class ModelOutput(collections.OrderedDict):
    """As in transformers: a dict whose entries are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Returns(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(x)


@pytest.mark.parametrize(
    ("wrap", "slots"),
    [
        (lambda x: (x, x + 1), ["[0]", "[1]"]),
        (lambda x: [x, [x, (x,)]], ["[0]", "[1][0]", "[1][1][0]"]),
        (lambda x: {"a": x, "b": {"c": x}, 3: x}, [".a", ".b.c", "[3]"]),
        (lambda x: Point(x, x), [".x", ".y"]),
        (lambda x: Data(x, [x, None, 5, "text"]), [".hidden", ".rest[0]"]),
        (lambda x: ModelOutput(logits=x, hidden_states=(x, x)), [".logits", ".hidden_states[0]", ".hidden_states[1]"]),
        (lambda x: torch.max(x.reshape(2, -1), dim=1), [".values", ".indices"]),
        (lambda x: (), []),
        (lambda x: None, []),
        (lambda x: "text", []),
        (lambda x: 3, []),
    ],
)
def test_nested_outputs_have_readable_slots(watch, wrap, slots):
    """Tuples, dicts, named tuples, dataclasses and model outputs are looked into; other values are left alone."""
    model = nn.ModuleDict({"m": Returns(wrap)})
    seen = watch(model, "m")
    model["m"](torch.randn(4))
    seen.tap.step()
    assert [record["slot"] for record in seen.records] == slots
    if not slots:
        assert seen.unseen() == {"m:output": "returned no tensor"}


def test_a_pattern_for_one_slot_takes_only_that(watch):
    """`m:output.hidden_states[1]` chooses one of several tensors."""
    model = nn.ModuleDict({"m": Returns(lambda x: ModelOutput(logits=x, hidden_states=(x, x)))})
    seen = watch(model, "m:output.hidden_states[1]")
    model["m"](torch.randn(4))
    seen.tap.step()
    assert seen.places == ["m:output.hidden_states[1]"]


class Takes(nn.Module):
    def forward(self, x: Tensor, *rest: Tensor, mask: Tensor | None = None, **more: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize(
    ("args", "kwargs", "slots"),
    [
        (1, [], [""]),
        (1, ["mask"], [".x", ".mask"]),
        (3, ["mask", "other"], [".x", "[1]", "[2]", ".mask", ".other"]),
        (0, ["x"], [""]),
    ],
)
def test_inputs_by_name(watch, args, kwargs, slots):
    """Positional arguments have their parameters' names, keywords their own; a single tensor needs none."""
    model = Takes()
    seen = watch(model, ":input")
    model(*(torch.randn(2) for _ in range(args)), **{name: torch.randn(2) for name in kwargs})
    seen.tap.step()
    assert [record["slot"] for record in seen.records] == slots


class Reuses(nn.Module):
    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.n):
            x = self.cell(x).tanh()
        return x


def test_every_call_of_a_reused_module_is_kept(watch, same):
    """Calls are numbered in forward order, for outputs, inputs, and the gradients that come back in reverse."""
    model, x = Reuses(), torch.randn(2, 3)
    outputs: list[Tensor] = []
    model.cell.register_forward_hook(lambda m, a, out: outputs.append(out))
    seen = watch(model, "cell:*")
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    seen.tap.step()
    gradients = torch.autograd.grad(loss, outputs)
    assert [r.call for r in seen.of("cell:output")] == [0, 1, 2]
    for call in range(3):
        assert same(seen.one("cell:output", call=call), outputs[call])
        assert same(seen.one("cell:grad_output", call=call), gradients[call])
    assert [r.call for r in seen.of("cell:grad_input")] == [1, 2]  # the first input needs no gradient


def test_a_call_without_gradients_keeps_the_numbers_right(watch):
    """A call under no_grad counts, so that gradients and outputs of one call have one number."""
    model = Reuses(1)
    seen = watch(model, "cell:{output,grad_output}")
    with torch.no_grad():
        model.cell(torch.randn(2, 3))
    model.cell(torch.randn(2, 3)).sum().backward()
    seen.tap.step()
    assert [r.call for r in seen.of("cell:output")] == [0, 1]
    assert [r.call for r in seen.of("cell:grad_output")] == [1]


def test_shared_modules_under_every_name(watch, same):
    """A module that has two names is recorded under both, whichever was called."""
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    seen = watch(model, "{0,2}:{output,grad_output}")
    model(torch.randn(2, 3)).sum().backward()
    seen.tap.step()
    for port in ("output", "grad_output"):
        first, second = seen.of(f"0:{port}"), seen.of(f"2:{port}")
        assert [r.call for r in first] == [r.call for r in second] == [0, 1]
        assert [r["mean"] for r in first] == [r["mean"] for r in second]


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = tt.tap(self.fc(x), "mine/hidden")
        return tt.tap((h * 2, [h]), "mine/pair")[0]


def test_named_values_and_their_gradients(watch, same):
    """`tt.tap` gives its argument back, and a pattern with a slash waits for it and for its gradient."""
    model = Named()
    seen = watch(model, "mine/hidden", "mine/*:grad_output", "fc:grad_output")
    model(torch.randn(2, 3)).square().sum().backward()
    seen.tap.step()
    assert sorted(seen.places) == [
        "fc:grad_output",
        "mine/hidden:grad_output",
        "mine/hidden:output",
        "mine/pair:grad_output[0]",
        "mine/pair:grad_output[1][0]",
    ]
    assert seen.one("mine/hidden:grad_output")["l2"] == seen.one("fc:grad_output")["l2"]


def test_watching_everything_sees_named_values_too(watch):
    """By default, and with `**`, named values are recorded beside the modules."""
    model = Named()
    seen = watch(model)
    model(torch.randn(2, 3))
    seen.tap.step()
    named = ["mine/hidden:output", "mine/pair:output[0]", "mine/pair:output[1][0]"]
    assert seen.places == ["fc:output", *named, ":output"]


def test_a_name_nobody_tapped_is_said(watch):
    """A pattern for a value that never came is listed as unseen."""
    model = Named()
    seen = watch(model, "fc", "other/value")
    model(torch.randn(2, 3))
    assert seen.unseen() == {"other/value": "no value of this name was tapped"}


def test_a_name_without_a_slash_is_taken_for_a_module():
    """A pattern that matches no module raises at set-up, as every misspelling does."""
    with pytest.raises(tt.TensortapError, match="hidden"):
        tt.watch(Named(), "hidden")


def test_named_values_cost_nothing_when_nobody_watches():
    """Without a tap the value comes straight back."""
    x = torch.randn(3)
    assert tt.tap(x, "mine/x") is x


def test_a_named_leaf_keeps_no_hook(watch):
    """The gradient of a tapped leaf tensor is seen, and the leaf is left as it was."""
    x = torch.randn(3, requires_grad=True)
    seen = watch(nn.Identity(), "mine/x:grad_output")
    for _ in range(3):
        tt.tap(x, "mine/x").sum().backward()
        seen.tap.step()
    assert len(seen.of("mine/x:grad_output")) == 3
    assert x._backward_hooks is None
