"""Operations that C observes: the rows of the Python way, to the last bit, and the modes as they would be."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from tensortap.adapters.torch.modules.tensors import HOOK_VARIABLE
from tensortap.adapters.torch.ops.hooks import ModuleEnterHook, ModuleExitHook
from tensortap.adapters.torch.ops.taps import OpTaps
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import COLUMNS

pytestmark = pytest.mark.skipif(
    kernels.ACTIVE == "numpy" or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="needs the C kernel and PyTorch's C exchange API",
)
depth = torch._C._len_torch_function_stack


class Attention(nn.Module):
    """Two products of its own, two layers, and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        return (self.q(x) @ self.k(x).mT).softmax(-1) @ x


class Recursive(nn.Module):
    """Calls itself, so that it runs inside its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, times: int = 2) -> Tensor:
        """Multiply before and after the inner calls."""
        y = x @ self.inner.weight
        y = self(y, times - 1) if times else self.inner(y)
        return y @ self.inner.weight


class Several(nn.Module):
    """Operations that return several tensors, or take keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Do them."""
        values, _ = torch.max(x @ x.mT, dim=-1)
        first, second = torch.split(values, [1, values.numel() - 1])
        return F.linear(input=x, weight=self.weight) * first + second.sum()


class Doubles(TorchFunctionMode):
    """A function mode of the user's that changes results."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Double what linear returns."""
        output = func(*args, **(kwargs or {}))
        return output * 2 if func is torch.nn.functional.linear else output


class WithMode(nn.Module):
    """Pushes a mode of its own around a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run it under the mode."""
        with Doubles():
            y = self.inner(x @ x.mT @ x)
        return y @ x.mT @ x


class Checkpointed(nn.Module):
    """Runs a part again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        """Checkpoint the layer."""
        return checkpoint(self.inner, x, use_reentrant=False)


def shared() -> nn.Module:
    """A layer that hangs at two places."""
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), nn.Sequential(layer, nn.Tanh()))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.Sequential(Attention(), nn.ReLU(), Attention()),
    "recursive": lambda: nn.Sequential(Recursive(), Recursive()),
    "several": lambda: nn.Sequential(Several()),
    "a mode": lambda: nn.Sequential(WithMode(), nn.Linear(4, 4)),
    "checkpoint": lambda: nn.Sequential(Checkpointed(), nn.Linear(4, 4)),
    "shared": shared,
    "lstm": lambda: nn.LSTM(4, 3),
}


def rows_of(memory: tt.Memory) -> list[list[str]]:
    """Every row as text: NaN equals NaN."""
    compared = [name for name in COLUMNS if name != "time"]
    records = sorted(memory.records, key=lambda record: (record.step, record.seq))
    return [[str(record.place), *(str(record[name]) for name in compared)] for record in records]


def result_of(output: Any) -> Tensor:
    """The tensor of a model's output."""
    return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("pattern", ["op:@matmul", "op:*", "op:{linear,softmax}:{input,output}"])
@pytest.mark.parametrize("name", list(MODELS))
def test_rows_are_those_of_the_python_way(name: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites, calls, order and values are equal, and so are outputs and gradients."""
    seen = []
    for way in ("c", "python"):
        monkeypatch.setenv(HOOK_VARIABLE, way)
        torch.manual_seed(0)
        model, x = MODELS[name](), torch.linspace(-1, 1, 12).reshape(3, 4)
        keep = [tt.stats(), tt.histogram(), tt.hash()]
        outputs = []
        with tt.watch(model, tt.probe(pattern, keep=keep), to=(memory := tt.Memory())) as watching:
            for number in range(4):
                outputs.append(result_of(model(x + number)))
                outputs[-1].sum().backward()
                assert depth() == 0
                watching.step()
        gradients = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
        seen.append((rows_of(memory), [output.tolist() for output in outputs], gradients))
    assert seen[0] == seen[1] and (seen[0][0] or name == "lstm")  # which is one operation, lstm


def test_python_is_not_asked_once_a_site_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on C begins and ends the calls of inner modules and records the products."""
    model, x = nn.Sequential(Attention(), nn.ReLU()), torch.randn(3, 4)
    asked: list[str] = []
    with tt.watch(model, "op:@matmul", to=(memory := tt.Memory())) as watching:
        for number in range(4):
            if number == 2:
                for owner, method in ((OpTaps, "observe"), (OpTaps, "take_left"), (ModuleEnterHook, "enter")):
                    monkeypatch.setattr(owner, method, told(asked, method, getattr(owner, method)))
            model(x)
            watching.step()
            watching.flush()  # a new table, which the writer's thread has not given back yet, would have to grow
    assert asked == ["enter", "enter"]  # of the root, whose call nothing is around
    assert len(memory.records) == 4 * 4


def told(asked: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that tells of its calls."""

    def tell(*args: Any, **kwargs: Any) -> Any:
        asked.append(name)
        return function(*args, **kwargs)

    return tell


class Failing(nn.Module):
    """Fails where it is told to: in an operation, in its own code, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        """Fail, or run."""
        if self.fails == "here":
            raise ValueError("here")
        return self.inner(x[:, :3] if self.fails == "operation" else x)


@pytest.mark.parametrize("fails", ["here", "operation"])
def test_a_failed_call_leaves_no_mode_and_no_module_behind(fails: str) -> None:
    """After an exception the thread has no mode of ours, and the next call has the sites and numbers it would have."""
    model, x = nn.Sequential(Failing(), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    with tt.watch(model, "op:@matmul", to=(memory := tt.Memory())) as watching:
        for number in range(5):
            model[0].fails = fails if number == 3 else ""
            if number == 3:
                with pytest.raises((ValueError, RuntimeError)):
                    model(x)
            else:
                model(x)
            assert depth() == 0
            watching.step()
    seen = [(record.step, str(record.place), record.call) for record in memory.records]
    assert seen == [
        (step, f"{path}/linear#0:output", 0) for step in (0, 1, 2, 4) for path in ("0.inner", "2")
    ]  # fmt: skip


def test_a_module_called_alone_is_observed() -> None:
    """An inner module that the user calls directly is the outermost one, and its operations are its own."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    with tt.watch(model, "op:@matmul", to=(memory := tt.Memory())) as watching:
        for _ in range(3):
            model(x)
            model[2](x)
            model[0](x)
            watching.step()
    places = [str(record.place) for record in memory.records]
    assert places == [f"{path}/linear#0:output" for path in (0, 2, 2, 0)] * 3


def test_threads_have_calls_and_modes_of_their_own() -> None:
    """Threads that run one model at once, while others collect garbage, record every product under its module."""
    model, x = nn.Sequential(Attention(), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)
    errors: list[BaseException] = []

    def repeat(work: Callable[[], Any]) -> None:
        try:
            for _ in range(25):
                work()
                assert depth() == 0
        except BaseException as error:  # the test tells of it
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with tt.watch(model, "op:@matmul", to=(memory := tt.Memory())) as watching, torch.no_grad():
            model(x)
            watching.step()
            works = [lambda: model(x), lambda: model(x), lambda: gc.collect(0)]
            threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
            for thread in threads:
                thread.start()
            repeat(lambda: model(x))
            for thread in threads:
                thread.join()
            watching.step()
    finally:
        sys.setswitchinterval(before)
    assert not errors
    sites = {str(record.place) for record in memory.records}
    assert sites == {f"{s}:output" for s in ("0/matmul#0", "0/matmul#1", "0.k/linear#0", "0.q/linear#0", "2/linear#0")}


def test_a_hook_shows_python_and_runs_c() -> None:
    """What the compiler follows is a Python function."""
    for kind in (ModuleEnterHook, ModuleExitHook):
        assert callable(vars(kind)["__call__"]) and hasattr(kind.__call__, "__code__")


@pytest.mark.parametrize(
    "given", [(), (None,), (len, ()), (len, (), ([],)), (len, (), ([1],), None), (len, (), [[1]], {})]
)
def test_odd_calls_of_the_mode_reach_python_or_the_function(given: tuple[Any, ...]) -> None:
    """Whatever C is called with as a mode's method, it does what the Python method would."""
    asked: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4))
    with tt.watch(model, "op:@matmul", to=[]) as watching:
        model(torch.randn(3, 4))
        hook = next(h for h in model[0]._forward_pre_hooks.values() if isinstance(h, ModuleEnterHook))
        native = kernels.ModeCall(
            hook.taps.reader, None, lambda *args: asked.append(args), {len: None}, hook.taps, hook.taps.running.state
        )
        if len(given) == 2:
            with pytest.raises(TypeError, match="exactly one argument"):
                native(*given)
        elif len(given) > 2 and isinstance(given[2], tuple):
            assert native(*given) == len(given[2][0]) and not asked
        else:
            native(*given)
            assert asked == [given]
        watching.step()


def test_taps_come_and_go_without_a_trace() -> None:
    """Attaching, observing and detaching again and again leaves no object behind."""
    model, x = nn.Sequential(Attention(), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4)

    def cycle(times: int) -> int:
        for _ in range(times):
            with tt.watch(model, "op:*", to=[]) as watching:
                for _ in range(3):
                    model(x).sum().backward()
                    watching.step()
        gc.collect()
        return len(gc.get_objects())

    cycle(5)
    objects = cycle(5)
    assert cycle(20) - objects < 20
