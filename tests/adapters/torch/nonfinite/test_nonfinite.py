"""While watching, a NaN or an infinity is traced to its origin at the moment it appears."""

import pytest
import torch
from torch import nn

import tensortap as tt


class Log(nn.Module):
    def forward(self, x):
        return x.relu().log()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Log(), nn.Linear(4, 2))


def train(model, steps, **options):
    with tt.watch(model, "**", "**:input", "**:grad_output", **options) as tap:
        for _ in range(steps):
            model(torch.randn(8, 4)).sum().backward()
            tap.step()
    return tap


def test_record_warns_once_with_the_origin_and_training_goes_on(tmp_path):
    """The operation, its module and the cause are in the warning; every step is there."""
    with pytest.warns(tt.TensortapWarning, match="log in 2 \\(Log\\), forward") as caught:
        tap = train(net(), 3, to=tmp_path / "run", on_nonfinite="record")
    assert len([w for w in caught if "not finite" in str(w.message)]) == 1
    assert tap.counts["nonfinite_steps"] == 3
    assert tap.run.steps == [0, 1, 2]


def test_raise_ends_the_training_after_the_step_is_safe(tmp_path):
    """The error carries the origin, and the step that caused it can be read."""
    with pytest.raises(FloatingPointError, match="log of 0") as caught:
        train(net(), 3, to=tmp_path / "run", on_nonfinite="raise")
    assert (caught.value.origin.site, caught.value.origin.operation) == ("2", "log")
    assert tt.open(tmp_path / "run").steps == [0]


def test_raise_works_where_steps_find_themselves_too(tmp_path):
    """Without tap.step() the next call of the model raises, for the step before it."""
    model = net()
    with (
        pytest.raises(FloatingPointError, match="step 0 is not finite"),
        tt.watch(model, to=tmp_path / "run", on_nonfinite="raise"),
    ):
        for _ in range(3):
            model(torch.randn(8, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_last_step_raises_when_the_tap_closes_and_leaves_nothing_behind(tmp_path):
    """A step that is still open when the tap closes is judged too, and the hooks are gone."""
    model = net()
    with pytest.raises(FloatingPointError), tt.watch(model, to=tmp_path / "run", on_nonfinite="raise"):
        model(torch.randn(8, 4))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert tt.open(tmp_path / "run").state == "finished"


def test_a_function_is_called_with_the_origin(tmp_path):
    """A callback gets what was found, step by step."""
    found = []
    train(net(), 2, to=tmp_path / "run", on_nonfinite=found.append)
    assert [(origin.site, origin.direction) for origin in found] == [("2", "forward")] * 2


def test_an_error_in_the_callback_is_counted(tmp_path):
    """A callback that fails does not stop the training."""
    with pytest.warns(tt.TensortapWarning, match="on_nonfinite failed"):
        tap = train(net(), 2, to=tmp_path / "run", on_nonfinite=lambda origin: 1 / 0)
    assert tap.counts["callback_errors"] == 2


def test_a_gradient_that_is_not_finite_is_found(tmp_path):
    """A fault that only backward shows is told by the first gradient that has it, with the call that names more."""

    class Root(nn.Module):
        def forward(self, x):
            return (x * 0).sum(-1).sqrt()

    found = []
    train(nn.Sequential(nn.Linear(4, 4), Root()), 1, to=tmp_path / "run", on_nonfinite=found.append)
    assert found[0].direction == "backward" and found[0].output.nan + found[0].output.posinf > 0
    assert "tt.locate_nonfinite(model, step)" in str(found[0])
    with pytest.warns(tt.TensortapWarning, match="not finite"):
        tap = train(nn.Sequential(nn.Linear(4, 4), Root()), 1, to=tmp_path / "recorded", on_nonfinite="record")
    assert "tt.locate_nonfinite(model, step)" in tap.run.findings(rules=["nonfinite"])[0].message


def test_looking_for_the_origin_changes_nothing():
    """Running the module again leaves weights, running statistics and random state as an unwatched run has them."""
    results = []
    for watched in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Log(), nn.Linear(4, 2))
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        tap = tt.watch(model, to=tt.Memory(), on_nonfinite=lambda origin: None) if watched else None
        for _ in range(3):
            model(torch.randn(8, 4))
            if tap:
                tap.step()
        if tap:
            tap.close()
        results.append([*(b.clone() for b in model.buffers()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_weights_that_are_nan_already_are_left_alone():
    """Backward goes on after a search among NaN weights: putting them back would spoil what autograd saved."""
    model = nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 1))
    nn.init.constant_(model[0].weight, float("nan"))
    with tt.watch(model, to=tt.Memory(), on_nonfinite=lambda origin: None):
        model(torch.ones(2, 4)).sum().backward()
    assert model[2].weight.grad is not None


def test_a_wish_that_is_none_is_refused():
    """The error names what may be wished."""
    with pytest.raises(tt.TensortapError, match="must be 'record', 'raise' or a function"):
        tt.watch(net(), to=tt.Memory(), on_nonfinite="panic")
