"""Parameters, their gradients as the optimizer uses them, and their updates."""

from __future__ import annotations

import pytest
import torch
from small_net import net
from torch import Tensor, nn
from torch.nn.utils import clip_grad, clip_grad_norm_

import tensortap as tt


def x() -> Tensor:
    return torch.randn(5, 3)


def test_parameters_gradients_and_updates(watch, same):
    """The values before the step, the gradient it uses, and the change it makes with its relative size."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    seen = watch(model, "**:{param,grad,update}")
    model(x()).square().sum().backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.step()
    seen.tap.step()
    for name, parameter in model.named_parameters():
        change = parameter.detach() - before[name]
        assert same(seen.one(f"{name}:param"), before[name])
        assert same(seen.one(f"{name}:grad"), parameter.grad)
        assert same(seen.one(f"{name}:update"), change)
        ratio = seen.one(f"{name}:update").numbers["ratio"]
        assert ratio == pytest.approx(float(change.norm() / before[name].norm()), rel=1e-6)


class Outer(torch.optim.Optimizer):
    """Lets another optimizer do half of its work, and does the rest itself, as ZeroRedundancyOptimizer does."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"][:2], 0.1)

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for parameter in self.param_groups[0]["params"][2:]:
            parameter.sub_(parameter.grad)


def test_an_optimizer_inside_another(watch, same):
    """One row each: the update is all that the outer optimizer's step did, also to what the inner one does not hold."""
    model = net()
    optimizer = Outer(list(model.parameters()))
    seen = watch(model, "**:{param,grad,update}")
    for _ in range(2):
        model(x()).square().sum().backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.step()
        seen.tap.step()
    for name, parameter in model.named_parameters():
        assert same(seen.of(f"{name}:update")[1], parameter.detach() - before[name])
        assert [len(seen.of(f"{name}:{port}")) for port in ("param", "grad", "update")] == [2, 2, 2]


def test_gradients_are_summed_over_micro_batches(watch, same):
    """One record a step: the accumulated gradient."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, "0.weight:grad")
    for _ in range(3):
        model(x()).sum().backward()
    optimizer.step()
    seen.tap.close()
    assert same(seen.one("0.weight:grad"), model[0].weight.grad)


def test_gradients_that_megatron_moves_away(watch, same):
    """What a hook adds to `main_grad`, with `.grad` set to None, is the gradient of the step."""

    def move(parameter):
        parameter.main_grad += parameter.grad
        parameter.grad = None

    model = net()
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.register_post_accumulate_grad_hook(move)
    seen = watch(model, "**:grad")
    model(x()).sum().backward()
    seen.tap.step()
    for name, parameter in model.named_parameters():
        assert same(seen.one(f"{name}:grad"), parameter.main_grad)


def test_gradients_are_recorded_before_clipping_with_the_factor(watch, same):
    """`clip_grad_norm_` between backward and step: one row, before it, that says by how much it is clipped."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, "**:grad")
    (100 * model(x()).sum()).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    seen.tap.close()
    for name, parameter in model.named_parameters():
        record = seen.one(f"{name}:grad")
        assert same(record, before[name])
        assert record["l2"] * record.numbers["clip"] == pytest.approx(float(parameter.grad.norm()), rel=1e-5)


def test_a_gradient_small_enough_is_clipped_by_one(watch):
    """Where the norm is below the limit, the factor is one: clipping was seen and changed nothing."""
    model = net()
    seen = watch(model, "0.weight:grad")
    model(x()).sum().backward()
    clip_grad_norm_(model.parameters(), 1e6)
    seen.tap.close()
    assert seen.one("0.weight:grad").numbers == {"clip": 1.0}


def test_unscaled_and_clipped(watch):
    """With a GradScaler the row is the unscaled gradient, before clipping."""
    model, batch = net(), x()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = watch(model, "2.bias:grad")
    scaler.scale(model(batch).sum()).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    seen.tap.close()
    record = seen.one("2.bias:grad")
    assert record["mean"] == 5.0 and 0 < record.numbers["clip"] < 1


def test_what_changes_a_gradient_after_clipping_is_recorded_too(watch):
    """A gradient that goes on to grow after clipping has a second row, as the optimizer uses it."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, "2.bias:grad")
    model(x()).sum().backward()
    clip_grad_norm_(model.parameters(), 0.5)
    model(x()).sum().backward()
    optimizer.step()
    seen.tap.close()
    first, second = seen.of("2.bias:grad")
    assert list(first.numbers) == ["clip"] and second.numbers == {}
    assert (first.call, second.call) == (0, 1) and second["mean"] == pytest.approx(float(model[2].bias.grad.mean()))


def test_two_optimizer_steps_in_one_step_are_two_rows_before_clipping(watch):
    """Each time the optimizer steps, the gradient it was given is recorded as it was before clipping."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, "2.bias:grad")
    for size in (1, 2):
        optimizer.zero_grad()
        (size * model(x()).sum()).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        seen.tap.steps.explicit = True  # one step, as the user means it
    seen.tap.step()
    assert [r["mean"] for r in seen.of("2.bias:grad")] == [5.0, 10.0]
    assert all(list(r.numbers) == ["clip"] for r in seen.records)


@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: nn.utils.clip_grad_value_(parameters, 0.5),
        lambda parameters: nn.utils.clip_grads_with_norm_(parameters, 0.5, torch.tensor(1.0)),
        lambda parameters: [p.grad.mul_(0.5) for p in parameters],
    ],
    ids=["by value", "with a norm", "by hand"],
)
def test_other_clipping_is_recorded_clipped(watch, clip):
    """`clip_grad_value_` and `clip_grads_with_norm_`, called themselves, are not seen: the row is what is used."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, "2.bias:grad")
    model(x()).sum().backward()
    clip(list(model.parameters()))
    used = model[2].bias.grad.max().item()
    optimizer.step()
    seen.tap.close()
    assert used < 5 and seen.one("2.bias:grad")["max"] == used and seen.one("2.bias:grad").numbers == {}


def test_clipping_is_as_it_was_where_nobody_asks(watch):
    """PyTorch's own function is in its place on steps that want no gradient, and after the last tap is closed."""
    original = clip_grad._clip_grads_with_norm_
    model = net()
    first = watch(model, tt.probe("0.weight:grad", when=tt.every(2)))
    second = watch(model, "0.weight:grad")
    assert clip_grad._clip_grads_with_norm_ != original
    second.tap.close()
    assert clip_grad._clip_grads_with_norm_ != original
    first.tap.step()
    assert clip_grad._clip_grads_with_norm_ is original
    first.tap.step()
    assert clip_grad._clip_grads_with_norm_ != original
    first.tap.close()
    assert clip_grad._clip_grads_with_norm_ is original


def test_clipping_with_taps_changes_no_bit():
    """Clipped training gives the same parameters, and the same norms, with taps as without."""
    runs = []
    for watched in (False, True):
        torch.manual_seed(3)
        model, norms = net(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        tap = tt.watch(model, "**:grad", to=tt.Memory()) if watched else None
        for _ in range(3):
            optimizer.zero_grad()
            model(x()).square().sum().backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        if tap is not None:
            tap.close()
        runs.append([*norms, *(p.detach() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_under_a_scaler_are_unscaled(watch, fused):
    """With a GradScaler the gradient is that of the unscaled loss, also where the optimizer unscales itself."""
    reference, model, batch = net(), net(), x()
    model.load_state_dict(reference.state_dict())
    reference(batch).square().sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen = watch(model, "**:grad")
    scaler.scale(model(batch).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    seen.tap.close()
    for name, parameter in reference.named_parameters():
        assert seen.one(f"{name}:grad")["l2"] == pytest.approx(float(parameter.grad.norm()), rel=1e-6)


def test_a_step_that_the_scaler_skips_is_still_a_step(watch):
    """An overflow makes the scaler skip the optimizer: the gradients are recorded as they are, and the step ends."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    seen = watch(model, "0", "0.weight:grad")
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(factor * model(x()).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    seen.tap.close()
    assert [r.step for r in seen.of("0:output")] == [0, 1, 2]
    assert [r.step for r in seen.of("0.weight:grad")] == [0, 2]


def test_without_an_optimizer_gradients_are_taken_when_the_step_closes(watch, same):
    """Evaluation and hand-written training show what `.grad` holds at the end."""
    model = net()
    seen = watch(model, "0.weight:{param,grad}", "0")
    model(x()).sum().backward()
    seen.tap.step()
    assert same(seen.one("0.weight:grad"), model[0].weight.grad)
    assert same(seen.one("0.weight:param"), model[0].weight)


def test_tied_weights_under_both_names(watch):
    """A tied parameter is recorded under every name it has."""
    model = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    seen = watch(model, "**:{param,grad}")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model["head"](model["embed"](torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    seen.tap.step()
    for port in ("param", "grad"):
        assert seen.one(f"embed.weight:{port}")["l2"] == seen.one(f"head.weight:{port}")["l2"]


def test_a_parameter_that_was_replaced_is_followed(watch, same):
    """The parameter that is there now is recorded, not the one at set-up."""
    model = net()
    seen = watch(model, "0.weight:param")
    model[0].weight = nn.Parameter(torch.ones(4, 3))
    seen.tap.step()
    assert same(seen.one("0.weight:param"), torch.ones(4, 3))


def test_sparse_gradients(watch):
    """A sparse gradient is taken by its values."""
    model = nn.Embedding(10, 3, sparse=True)
    seen = watch(model, "weight:grad")
    optimizer = torch.optim.SparseAdam(list(model.parameters()))
    model(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    seen.tap.step()
    assert seen.one("weight:grad")["shape"] == (2, 3)


def test_frozen_and_unreached_parameters_are_explained(watch):
    """Why there is no gradient or update is said for each parameter."""
    model = net()
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(2))
    model.register_parameter("unused", unused)
    seen = watch(model, "**:{grad,update}")
    model(x()).sum().backward()
    seen.tap.step()
    unseen = seen.unseen()
    assert unseen["0.weight:grad"] == "requires no gradient"
    assert unseen["unused:grad"] == "no gradient reached it"
    assert unseen["0.bias:update"] == "no optimizer stepped it"
    assert "0.bias:grad" not in unseen


def test_an_update_of_a_zero_parameter_is_infinite(watch):
    """The relative size of a change from nothing is infinite, not an error."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    seen = watch(model, "weight:update")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    seen.tap.step()
    assert seen.one("weight:update").numbers["ratio"] == float("inf")


def test_only_every_other_step_clones_parameters(watch):
    """Updates are followed only in steps that a probe wants."""
    model = net()
    seen = watch(model, tt.probe("**:update", when=tt.every(2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        model(x()).sum().backward()
        optimizer.step()
        seen.tap.step()
    assert seen.steps == [0, 2]


def test_no_step_walks_the_modules(watch, monkeypatch):
    """What is walked is walked at attach: the cost of parameters must not grow with parameters times modules."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, "**:{param,grad,update,buffer}")
    walked = []
    for name in ("modules", "named_modules", "children", "named_children", "parameters", "named_parameters"):
        original = getattr(nn.Module, name)
        monkeypatch.setattr(nn.Module, name, lambda *a, _o=original, _n=name, **k: (walked.append(_n), _o(*a, **k))[1])
    for _ in range(3):
        optimizer.zero_grad()
        model(x()).sum().backward()
        optimizer.step()
    seen.tap.step()
    assert walked == [] and len(seen.of("0.weight:update")) == 3
