"""The function mode beside the user's own modes, errors and threads."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from tests.adapters.torch.ops.test_ops_same import modes
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tensortap as tt


class Counting(TorchFunctionMode):
    """A mode of the user's: counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_modes_of_the_users_see_what_they_saw(watch):
    """A mode around the model, and one inside its forward, see the same functions in the same order, and come off."""
    inner = Counting()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with inner:
                return self.fc(x).softmax(-1) @ x.T

    def run(model: nn.Module) -> tuple[list[str], list[str]]:
        inner.seen = []
        with Counting() as outer:
            model(torch.ones(6, 8))
        return outer.seen, inner.seen

    model = Model()
    bare = run(model)
    seen = watch(model, "op:*:{input,output}", strict=True)
    assert run(model) == bare and modes() == 0
    seen.tap.step()
    assert [r["op"] for r in seen.records if r.place.port == "output"] == ["linear", "softmax", "matmul"]


def test_modes_of_the_users_see_no_gradient_taken():
    """What is done to tensors for gradients of modules, operations and named values is not seen by a mode around it."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return tt.tap(x * 2 + x * 3, "my/value").tanh()

    def run(*probes: Any) -> list[str]:
        model, x = Model(), torch.ones(2, requires_grad=True)
        tap = tt.watch(model, *probes, to=tt.Memory(), strict=True) if probes else None
        with Counting() as outer:
            torch.autograd.backward(model(x).sum())
        if tap is not None:
            tap.close()
            assert tap.counts == {}
        return outer.seen

    assert run("op:*:*", ":*", "my/value:{output,grad_output}") == run()


def test_a_closure_that_goes_through_the_mode_is_not_kept(watch):
    """A function that somebody makes for one call, with a tensor in it, is free after it."""
    refs = []

    def scaled(by: Tensor, x: Tensor) -> Tensor:
        def scale(x: Tensor) -> Tensor:
            return torch.overrides.handle_torch_function(scale, (x,), x) if modes() else x * by

        refs.append(weakref.ref(by))
        return scale(x)

    model = nn.Identity()
    model.forward = lambda x: scaled(x + 1, x)
    watch(model, "op:*", strict=True)
    model(torch.ones(2))
    gc.collect()
    assert refs[0]() is None


def test_a_mode_that_is_left_on_stays_on(watch):
    """A mode that forward puts on and leaves on is still on afterwards, and ours is not."""
    mode = Counting()
    model = nn.Linear(2, 2)
    model.forward = lambda x: (mode.__enter__(), x * 2)[1]
    watch(model, "op:*")
    model(torch.ones(2))
    assert modes() == 1 and torch._C._get_function_stack_at(0) is mode
    mode.__exit__(None, None, None)


def test_the_mode_leaves_when_forward_fails(watch):
    """An exception in a module goes through as it is, and no mode is left on; the next step is seen."""

    class Fails(nn.Module):
        on = True

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                raise KeyError("mine")
            return x @ x

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    seen = watch(model, "op:*", strict=True)
    with pytest.raises(KeyError, match="mine"):
        model(torch.ones(2, 2))
    assert modes() == 0
    Fails.on = False
    model(torch.ones(2, 2))
    seen.tap.step()
    assert seen.of("1/matmul#0:output")


def test_an_interrupt_is_got_over(watch):
    """Ctrl-C ends a call without telling hooks; the next call of the model starts clean, and closing too."""

    class Stops(nn.Module):
        on = True

        def forward(self, x: Tensor) -> Tensor:
            if self.on:
                raise KeyboardInterrupt
            return x @ x

    model = nn.Sequential(nn.Linear(2, 2), Stops())
    seen = watch(model, "op:*")
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 2))
    Stops.on = False
    model(torch.ones(2, 2))
    assert modes() == 0
    Stops.on = True
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(2, 2))
    seen.tap.close()
    assert modes() == 0


def test_an_error_of_the_operation_is_the_users(watch):
    """A product of shapes that do not fit raises what it raised before."""
    model = nn.Linear(2, 2)
    seen = watch(model, "op:*:*")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        model(torch.ones(3, 3))
    assert modes() == 0
    assert not seen.tap.counts


def test_threads_have_modes_of_their_own(watch):
    """Two threads that call the model at once each see their own operations; a third that does not has no mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    seen = watch(model, "op:{linear,relu}", strict=True)
    barrier, depths, errors = threading.Barrier(3), [], []

    def call(width: int) -> None:
        try:
            barrier.wait()
            for _ in range(10):
                with torch.no_grad():
                    model(torch.randn(width, 4))
            depths.append(modes())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(width,)) for width in (2, 3)]
    for thread in threads:
        thread.start()
    barrier.wait()
    assert modes() == 0
    for thread in threads:
        thread.join()
    seen.tap.close()
    assert errors == [] and depths == [0, 0]
    for place in ("0/linear#0:output", "1/relu#0:output", "2/linear#0:output"):
        widths = [r.summary.shape[0] for r in seen.of(place)]
        assert (widths.count(2), widths.count(3)) == (10, 10)
    assert len(seen.records) == 60


def test_a_function_that_is_no_key(watch):
    """A library's own callable that cannot be hashed runs as it did, and is not seen."""

    class Unhashable(list):
        def __call__(self, x: Tensor) -> Tensor:
            return torch.overrides.handle_torch_function(self, (x,), x) if modes() else x * 2

    double = Unhashable()
    model = nn.Identity()
    model.forward = lambda x: double(x).relu()
    seen = watch(model, "op:*", strict=True)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 2.0))
    seen.tap.step()
    assert seen.places == ["/relu#0:output"]
