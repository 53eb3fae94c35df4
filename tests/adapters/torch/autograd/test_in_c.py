"""Gradients of outputs and updates that C takes: the rows of the Python way, to the last bit."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tensortap as tt
from tensortap.adapters.torch.autograd.gradients import NodeHook
from tensortap.adapters.torch.autograd.updates import CopiedParameters
from tensortap.adapters.torch.modules.hooks import ForwardHook
from tensortap.adapters.torch.modules.tensors import HOOK_VARIABLE
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import COLUMNS

pytestmark = pytest.mark.skipif(
    kernels.ACTIVE == "numpy" or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="needs the C kernel and PyTorch's C exchange API",
)
BOTH = [tt.stats(), tt.histogram(), tt.hash()]
Train = Callable[[nn.Module, torch.Tensor], Any]


def rows_of(memory: tt.Memory) -> list[list[str]]:
    """Every row and its numbers as text: NaN equals NaN."""
    compared = [name for name in COLUMNS if name != "time"]
    records = sorted(memory.records, key=lambda record: (record.step, record.seq))
    return [[str(record.place), *(str(record[name]) for name in compared), str(record.numbers)] for record in records]


def small() -> nn.Module:
    """A model with a module that is used twice, and one that returns a view."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), shared, nn.Tanh(), shared, nn.Flatten(), nn.Linear(4, 2))


def once(model: nn.Module, x: torch.Tensor) -> None:
    """An ordinary backward."""
    model(x).sum().backward()


def twice(model: nn.Module, x: torch.Tensor) -> None:
    """Two calls in a step, and a second backward over the graph of the last."""
    model(x).sum().backward()
    loss = model(x * 2).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def without_gradients(model: nn.Module, x: torch.Tensor) -> None:
    """A call in which nothing is differentiated, before one in which it is."""
    with torch.no_grad():
        model(x)
    once(model, x)


def recomputed(model: nn.Module, x: torch.Tensor) -> None:
    """Every layer runs again in backward."""
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    x.sum().backward()


def late(model: nn.Module, x: torch.Tensor) -> None:
    """A backward of a part of the outputs, with another part that is never used."""
    model(x)
    model(x)[:1].sum().backward()


class Seen(torch.overrides.TorchFunctionMode):
    """A function mode of the user's."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        return function(*args, **(kwargs or {}))


def under_a_mode(model: nn.Module, x: torch.Tensor) -> None:
    """What a hook asks of a tensor must not reach the user's mode."""
    with Seen():
        once(model, x)


@pytest.mark.parametrize("probes", [("*:grad_output",), ("*", "*:grad_output")], ids=["alone", "with outputs"])
@pytest.mark.parametrize(
    "train", [once, twice, without_gradients, recomputed, late, under_a_mode], ids=lambda train: train.__name__
)
def test_gradients_are_those_of_the_python_way(
    train: Train, probes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, calls and their order are equal, and so are the gradients that training goes on with."""
    seen = []
    for way in ("c", "python"):
        monkeypatch.setenv(HOOK_VARIABLE, way)
        model, x = small(), torch.linspace(-2, 2, 12).reshape(3, 4)
        with tt.watch(model, tt.probe(*probes, keep=BOTH), to=(memory := tt.Memory())) as watching:
            for number in range(4):
                train(model, x + number)
                watching.step()
        seen.append((rows_of(memory), [p.grad.tolist() for p in model.parameters() if p.grad is not None]))
    assert seen[0] == seen[1]
    assert {row[0] for row in seen[0][0]} >= {"0:grad_output", "6:grad_output"}


def test_steps_that_want_one_of_the_two_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs at every step and gradients at every other: what each step wants, and no more."""
    seen = []
    for way in ("c", "python"):
        monkeypatch.setenv(HOOK_VARIABLE, way)
        model, x = small(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
        probes = [tt.probe("0", when=tt.every(3)), tt.probe("0:grad_output", when=tt.every(2))]
        with tt.watch(model, *probes, to=(memory := tt.Memory())) as watching:
            for _ in range(12):
                once(model, x)
                watching.step()
        seen.append(rows_of(memory))
    assert seen[0] == seen[1] and len(seen[0]) == 4 + 6


def test_c_awaits_gradients_once_one_has_come() -> None:
    """The Python method of the hook is called in the first two steps and not after them."""
    model, x = small(), torch.randn(3, 4)
    with tt.watch(model, "0:grad_output", to=(memory := tt.Memory())) as watching:
        for _ in range(2):
            once(model, x)
            watching.step()
        (hook,) = [hook for hook in model[0]._forward_hooks.values() if isinstance(hook, ForwardHook)]
        assert not hook.for_c
        pattern, probes = hook.grad_outputs[0], hook.grad_outputs[0].bits
        hook.grad_outputs, hook.outputs = None, None  # the Python method would fail
        once(model, x)
        watching.step()
        hook.grad_outputs, hook.outputs = [pattern], []
    assert probes and [record.step for record in memory.records] == [0, 1, 2]
    assert not watching.counts.get("skipped_tensors")


def test_what_registering_cannot_do_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while C puts its hook on a node goes to Python, which counts its own; the model runs on."""
    model, x = small(), torch.randn(3, 4)
    with (
        pytest.warns(UserWarning, match="awaiting the gradient"),
        tt.watch(model, "0:grad_output", to=(memory := tt.Memory())) as watching,
    ):
        for number in range(4):
            with monkeypatch.context() as patched:
                if number == 2:
                    patched.setattr(torch.autograd.Function, "_register_hook", staticmethod(failing))
                once(model, x)
            watching.step()
    assert [record.step for record in memory.records] == [0, 1, 3]
    assert watching.counts["skipped_tensors"] == 1


def failing(*args: Any) -> None:
    """What PyTorch calls to keep a hook, broken."""
    raise RuntimeError("no hook today")


def test_threads_await_and_collect_at_once() -> None:
    """Threads that train copies of one place at once, while garbage is collected, record whole rows."""
    model = small()
    errors: list[BaseException] = []

    def repeat(work: Callable[[], Any]) -> None:
        try:
            for _ in range(20):
                work()
        except BaseException as error:  # the test tells of it
            errors.append(error)

    def work() -> None:
        model(torch.randn(64, 4)).sum().backward()

    with tt.watch(model, "*", "*:grad_output", to=(memory := tt.Memory())) as watching:
        work()
        watching.step()
        threads = [threading.Thread(target=repeat, args=(w,)) for w in (work, work, lambda: gc.collect(1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        watching.step()
    assert not errors
    assert len([r for r in memory.records if str(r.place) == "0:grad_output"]) == 41


def test_a_graph_that_is_dropped_takes_its_hooks_along() -> None:
    """Hooks on the nodes of a graph live as long as the graph; nothing of ours keeps it or its step."""
    model, x = small(), torch.randn(3, 4)
    with tt.watch(model, "*:grad_output", to=[]) as watching:
        for _ in range(3):
            once(model, x)
            watching.step()
        before = hooks_on_nodes()
        output = model(x)
        assert hooks_on_nodes() == before + 5 + 2 * 2  # the shared layer runs twice and has two names
        del output
        assert hooks_on_nodes() == before


def hooks_on_nodes() -> int:
    """Return how many hooks on nodes are alive."""
    gc.collect()
    return sum(isinstance(found, NodeHook) for found in gc.get_objects())


def mixed(dtype: torch.dtype) -> nn.Module:
    """Parameters of many forms: a vector, a matrix, single elements, a transposed one, a large one, a half."""
    torch.manual_seed(0)
    model = nn.Module()
    model.vector = nn.Parameter(torch.randn(7, dtype=dtype))
    model.matrix = nn.Parameter(torch.randn(5, 6, dtype=dtype))
    model.single = nn.Parameter(torch.randn(1, dtype=dtype))
    model.scalar = nn.Parameter(torch.tensor(0.5, dtype=dtype))
    model.transposed = nn.Parameter(torch.randn(6, 4, dtype=dtype).t())
    model.empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
    model.zeros = nn.Parameter(torch.zeros(4, dtype=dtype))
    model.large = nn.Parameter(torch.randn(2**18 + 1, dtype=dtype))
    model.short = nn.Parameter(torch.randn(8).to(torch.bfloat16))
    model.forward = lambda x: x  # type: ignore[method-assign]
    return model


def set_gradients(model: nn.Module, number: int) -> None:
    """Give every parameter a gradient; some of the last step's are not finite."""
    for i, parameter in enumerate(model.parameters()):
        parameter.grad = (
            torch.sin(torch.arange(parameter.numel()) + i + number).to(parameter.dtype).reshape(parameter.shape)
        )
        if number == 2 and parameter.numel() > 4:
            parameter.grad.view(-1)[:3] = torch.tensor([float("inf"), float("nan"), 0.0])


class Wrapping(torch.optim.SGD):
    """An optimizer that has another one step, with the same parameters."""

    inner: torch.optim.Optimizer

    def step(self, closure: Any = None) -> Any:
        """Step the inner one."""
        return self.inner.step()


@pytest.mark.parametrize("kind", ["one", "two", "wrapping"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_updates_are_those_of_the_python_way(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, hashes and ratios are equal for parameters of all forms, and so are the parameters."""
    seen = []
    for way in ("c", "python"):
        monkeypatch.setenv(HOOK_VARIABLE, way)
        model = mixed(dtype)
        optimizers = optimizers_of(kind, list(model.parameters()))
        with tt.watch(model, tt.probe("**:update", keep=BOTH), to=(memory := tt.Memory())) as watching:
            for number in range(3):
                set_gradients(model, number)
                for optimizer in optimizers:
                    optimizer.step()
                watching.step()
        seen.append((rows_of(memory), str([p.tolist() for p in model.parameters() if p.numel() < 100])))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 3 * len(list(mixed(dtype).parameters()))
    assert all("ratio" in row[-1] for row in seen[0][0])


def optimizers_of(kind: str, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """One optimizer for all, two that share them out, or one inside another."""
    if kind == "two":
        return [torch.optim.SGD(parameters[:4], lr=0.1), torch.optim.Adam(parameters[4:], lr=0.1)]
    one = torch.optim.SGD(parameters, lr=0.1)
    if kind == "one":
        return [one]
    outer = Wrapping(parameters, lr=0.1)
    outer.inner = one
    return [outer]


def test_a_parameter_that_changes_its_size_in_the_step_is_counted() -> None:
    """What cannot be subtracted is counted, and all others have their rows."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    class Growing(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> Any:
            model[1].bias.data += 1
            model[0].weight.data = torch.ones(5, 7)

    optimizer = Growing(model.parameters(), {})
    with (
        pytest.warns(UserWarning, match="recording 0.weight:update"),
        tt.watch(model, "**:update", to=(memory := tt.Memory())) as watching,
    ):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        watching.step()
    assert watching.counts["skipped_tensors"] == 1
    assert {str(record.place): record["mean"] for record in memory.records} == {
        "0.bias:update": 0, "1.weight:update": 0, "1.bias:update": 1,
    }  # fmt: skip


def test_steps_that_fail_leave_one_copy() -> None:
    """An optimizer that fails again and again keeps no more than its last copies, and the next update is right."""
    model = nn.Linear(2, 2)

    class Failing(torch.optim.Optimizer):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ValueError("not now")
            model.bias.data += 1

    optimizer = Failing(model.parameters(), {})
    with tt.watch(model, "**:update", to=(memory := tt.Memory())) as watching:
        for number in range(5):
            with pytest.raises(ValueError, match="not now"):
                optimizer.step()
            model.bias.data += number
        held = [found for found in gc.get_objects() if isinstance(found, CopiedParameters)]
        assert len(held) == 1
        del held
        optimizer.fails = False
        optimizer.step()
        watching.step()
    updates = [record["mean"] for record in memory.records if str(record.place) == "bias:update"]
    assert updates == [pytest.approx(1, abs=1e-6)]


def test_more_updates_than_a_table_has_room_for() -> None:
    """A table that grows while changes are recorded has a right row for each: no difference is taken twice."""
    model = nn.ParameterList([nn.Parameter(torch.full((3,), float(i))) for i in range(700)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tt.watch(model, tt.probe("**:update", keep=BOTH), to=(memory := tt.Memory())) as watching:
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full((3,), float(i % 7 + 1))
        optimizer.step()
        watching.step()
    assert [record["mean"] for record in memory.records] == [-float(i % 7 + 1) for i in range(700)]
    ratios = [dict(record.numbers)["ratio"] for record in memory.records]
    assert ratios[1:] == pytest.approx([(i % 7 + 1) / i for i in range(1, 700)])
    assert ratios[0] == float("inf")
