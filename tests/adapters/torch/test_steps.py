"""StepSource: closed by hand, or found by the calls of the root, backward and the optimizer."""

from __future__ import annotations

import itertools

import pytest
import torch
from small_net import calls, net, x
from torch import Tensor, nn

import tensortap as tt


def test_explicit_steps_count_from_zero_and_carry_metrics(watch):
    """`tap.step(...)` closes the step; metrics may be tensors, with or without a graph."""
    model = net()
    seen = watch(model, "0")
    for _ in range(3):
        loss = model(x()).sum()
        seen.tap.step(loss=loss, lr=0.1)
    assert calls(seen) == {0: 1, 1: 1, 2: 1}
    assert set(seen.memory.metrics[2]) == {"loss", "lr"}


def test_after_the_first_explicit_step_only_it_closes_steps(watch):
    """Many calls of the root stay in one step once `tap.step()` was used."""
    model = net()
    seen = watch(model, "0")
    model(x())
    seen.tap.step()
    for _ in range(3):
        model(x())
    seen.tap.step()
    assert calls(seen) == {0: 1, 1: 3}


def two_views(model: nn.Module, tap: tt.Tap) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for loss in (2.0, 1.0):
        (model(x()) - model(x())).square().sum().backward()
        optimizer.step()
        tap.step(loss=loss)


def test_steps_that_call_the_model_twice(watch):
    """With `explicit_steps` each has both calls, from the first on; without, a warning says what was split."""
    model = net()
    seen = watch(model, "0", explicit_steps=True)
    two_views(model, seen.tap)
    assert calls(seen) == {0: 2, 1: 2}
    seen.tap.close()
    split = watch(model, "0")
    with pytest.warns(tt.TensortapWarning, match=r"1 of them are numbered before .* explicit_steps=True"):
        two_views(model, split.tap)
    assert calls(split) == {0: 1, 1: 1, 2: 2}


def test_a_new_call_of_the_root_closes_the_step(watch):
    """Inference: one call, one step."""
    model = net().eval()
    seen = watch(model, "0")
    with torch.no_grad():
        for _ in range(4):
            model(x())
    seen.tap.close()
    assert calls(seen) == {0: 1, 1: 1, 2: 1, 3: 1}


def train(model: nn.Module, lengths: list[int], *, set_to_none: bool = True, step: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for length in lengths:
        for _ in range(length):
            model(x()).square().mean().backward()
        if step:
            optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [4, 4], [1, 3, 2, 5]])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation_works_unasked(watch, lengths, set_to_none):
    """Calls with a backward and no optimizer step yet are micro-batches of one step, however many."""
    model = net()
    seen = watch(model, "0", "0:grad_output", "0.weight:grad")
    train(model, lengths, set_to_none=set_to_none)
    seen.tap.close()
    assert calls(seen) == calls(seen, "0:grad_output") == dict(enumerate(lengths))
    assert calls(seen, "0.weight:grad") == dict.fromkeys(range(len(lengths)), 1)


def test_gradients_thrown_away_end_the_step(watch):
    """Where gradients are cleared without an optimizer step (skipped, or hand-written), the step is over."""
    model = net()
    seen = watch(model, "0")
    train(model, [2, 1, 1], step=False)
    seen.tap.close()
    assert calls(seen) == {0: 2, 1: 1, 2: 1}


def test_many_micro_batches_are_said_once(watch):
    """After 64 micro-batches a warning names `tap.step`."""
    model = net()
    seen = watch(model, "0")
    with pytest.warns(tt.TensortapWarning, match=r"tap\.step"):
        train(model, [70])
    seen.tap.close()
    assert calls(seen) == {0: 70}


def test_phases_follow_training_mode(watch):
    """`phase` is train or eval; one training call makes a step a training step."""
    model = net()
    seen = watch(model, "0")
    model(x())
    model.eval()
    model(x())
    seen.tap.close()
    assert [r.phase for r in seen.records] == ["train", "eval"]


def test_validation_between_micro_batches_leaves_the_step_a_training_step(watch):
    """An eval call in the middle of accumulation does not rename the step."""
    model = net()
    seen = watch(model, "0")
    model(x()).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x())
    seen.tap.close()
    assert {r.phase for r in seen.records} == {"train"}


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, value: Tensor, depth: int = 3) -> Tensor:
        value = self.fc(value)
        return self(value, depth - 1) if depth > 1 else value


def test_recursion_is_one_step(watch):
    """A root that calls itself is one step, with as many calls."""
    model = Recursive()
    seen = watch(model, "fc", ":output")
    for _ in range(2):
        model(x())
    seen.tap.close()
    assert calls(seen, "fc:output") == calls(seen, ":output") == {0: 3, 1: 3}


def test_a_generating_loop_is_a_step_for_each_token(watch):
    """Each call of the root in an autoregressive loop is a step."""
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10)).eval()
    seen = watch(model, "1")
    tokens = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(5):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    seen.tap.close()
    assert [r["shape"] for r in seen.of("1:output")] == [(1, n, 10) for n in range(1, 6)]


class Fails(nn.Module):
    """Fails in the middle when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.error: BaseException | None = None

    def forward(self, value: Tensor) -> Tensor:
        value = self.a(value)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return self.b(value)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
@pytest.mark.parametrize("ports", ["output", "*"])
def test_a_failed_call_leaves_the_next_steps_right(watch, error, ports):
    """An exception, or Ctrl-C of which hooks are not told, does not disturb what follows."""
    model = Fails()
    seen = watch(model, f"{{a,b}}:{ports}", ":output")
    model(x())
    model.error = error
    with pytest.raises(type(error)):
        model(x())
    for _ in range(2):
        model(x())
    seen.tap.close()
    assert calls(seen, "a:output") == {0: 1, 1: 1, 2: 1, 3: 1}
    assert calls(seen, "b:output") == {0: 1, 2: 1, 3: 1}
    assert seen.tap._adapter._hooks.placement._calls.running == []


def test_with_closes_after_an_exception(watch):
    """ModuleExitHook the block by an exception closes the open step and takes the taps off."""
    model, memory = net(), tt.Memory()
    with pytest.raises(ZeroDivisionError), tt.watch(model, "0", to=memory):
        model(x())
        raise ZeroDivisionError
    assert [str(record.place) for record in memory.records] == ["0:output"]
    assert not model._forward_hooks and not model[0]._forward_hooks


def test_several_optimizers(watch):
    """Each parameter is recorded once a step, whichever of two optimizers steps it."""
    model = net()
    seen = watch(model, "0", "**:{param,grad,update}")
    first = torch.optim.SGD(model[0].parameters(), 0.1)
    second = torch.optim.Adam(model[2].parameters())
    for _ in range(3):
        model(x()).sum().backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    seen.tap.close()
    for name, port in itertools.product(("0.weight", "2.bias"), ("param", "grad", "update")):
        assert calls(seen, f"{name}:{port}") == {0: 1, 1: 1, 2: 1}, (name, port)


def test_an_optimizer_of_another_model_is_not_ours(watch):
    """StepSource of somebody else's optimizer do not end our steps."""
    model, other = net(), net()
    seen = watch(model, "0", "0.weight:grad")
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(2):
        model(x()).sum().backward()
        foreign.step()
    seen.tap.close()
    assert calls(seen) == {0: 2}


def test_a_closure(watch, same):
    """LBFGS calls the model inside its step: all evaluations are one step, and the gradient is the last one's."""
    model, batch = net(), x()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    seen = watch(model, "0", "0.weight:{param,grad,update}")
    counted = [0]

    def closure() -> Tensor:
        counted[0] += 1
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        return loss

    evaluations, gradients = [], []
    for _ in range(3):
        counted[0] = 0
        optimizer.step(closure)
        evaluations.append(counted[0])
        gradients.append(model[0].weight.grad.clone())
    seen.tap.close()
    assert calls(seen) == dict(enumerate(evaluations))
    for port in ("param", "grad", "update"):
        assert calls(seen, f"0.weight:{port}") == {0: 1, 1: 1, 2: 1}
    assert all(same(record, g) for record, g in zip(seen.of("0.weight:grad"), gradients, strict=True))


def test_pause_and_resume(watch):
    """A paused tap records nothing; what it had is kept, and the steps are counted on."""
    model = net()
    seen = watch(model, "0")
    model(x())
    seen.tap.pause()
    for _ in range(2):
        model(x())
        assert not model[0]._forward_hooks
    seen.tap.resume()
    model(x())
    seen.tap.close()
    assert calls(seen) == {0: 1, 3: 1}


def test_closing_twice(watch):
    """A second close does nothing, and what runs later is not recorded."""
    model = net()
    seen = watch(model, "0")
    model(x())
    seen.tap.close()
    model(x())
    seen.tap.close()
    assert calls(seen) == {0: 1}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_taps_on_one_model(watch, order):
    """Taps do not know of each other and can be closed in any order."""
    model = net()
    user = model[0].register_forward_hook(lambda *args: None)
    taps = [watch(model, "0", "0:grad_input", "**:grad"), watch(model, "0:*"), watch(model, "2", ":output")]
    model(x().requires_grad_()).sum().backward()
    for n, i in enumerate(order):
        taps[i].tap.close()
        model(x()).sum().backward()
        assert sum(bool(m._forward_hooks) for m in model.modules()) >= (1 if n == 2 else 2)
    assert list(model[0]._forward_hooks) == [user.id] and not model._forward_hooks
    assert [len(seen.of(place)) > 0 for seen, place in zip(taps, ("0:output", "0:input", "2:output"), strict=True)]


def test_only_observed_steps_carry_hooks(watch):
    """With `every(3)` the hooks are there in every third step and otherwise not."""
    model = net()
    seen = watch(model, tt.probe("**:*", when=tt.every(3)))
    present = []
    model[1].register_forward_hook(lambda *args: present.append(len(model[0]._forward_hooks)))
    for _ in range(7):
        model(x()).sum().backward()
        seen.tap.step()
    assert present == [1, 0, 0, 1, 0, 0, 1]
    assert seen.steps == [0, 3, 6]


def test_found_steps_switch_hooks_in_time(watch):
    """Where steps find themselves, the root's own inputs are seen in exactly the steps that are wanted."""
    model = net()
    seen = watch(model, tt.probe("**:{input,output,grad_input}", when=tt.every(2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        model(x().requires_grad_()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    seen.tap.close()
    for place in (":input", ":output", ":grad_input", "0:input", "2:output"):
        assert calls(seen, place) == {0: 1, 2: 1, 4: 1}, place


def test_a_direct_call_of_forward_is_said():
    """Hooks are passed by when `.forward()` is called directly: that no step can be found is said once."""
    model = net()
    memory = tt.Memory()
    with pytest.warns(tt.TensortapWarning, match="never called"), tt.watch(model, to=memory):
        model.forward(x())
    assert len(memory.records) == 3
