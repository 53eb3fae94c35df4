"""The ways of observing a model that `overhead.py` compares: floors, each port, and what commands record."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import nn

import tensortap as tt
from tensortap.reduce import _kernel
from tensortap.reduce.histogram import BUCKETS
from tensortap.reduce.statistics import ROW
from tensortap.script.options import PRESETS, RunOptions, probes_for
from tensortap.types import DTYPE_CODE

BOTH: Final = [tt.stats(), tt.histogram()]


Observing = contextlib.AbstractContextManager[Callable[[nn.Module], None]]


Way = Callable[[nn.Module], Observing]


def _leaf_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name and not any(True for _ in module.children())]


def _watch(choose: Callable[[nn.Module], list[Any]], **options: Any) -> Way:
    @contextlib.contextmanager
    def observing(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
        with (
            tempfile.TemporaryDirectory() as folder,
            tt.watch(model, *choose(model), to=f"{folder}/run", **options) as watching,
        ):
            yield lambda _: watching.step()

    return observing


def _leaves(port: str, keep: Any = None) -> Way:
    return _watch(lambda model: [tt.probe(*(f"{name}:{port}" for name in _leaf_names(model)), keep=keep or tt.stats())])


def _parameters(port: str, keep: Any = None) -> Way:
    return _watch(lambda model: [tt.probe(f"**:{port}", keep=keep or tt.stats())])


def _leaves_and_parameters(keep: Any) -> Way:
    return _watch(lambda model: [tt.probe(*(f"{name}:output" for name in _leaf_names(model)), "**:param", keep=keep)])


def _some(keep: Any) -> Way:
    return _watch(lambda model: [tt.probe(*_four_names(model), keep=keep)])


def _four_names(model: nn.Module) -> list[str]:
    names = _leaf_names(model)
    return names[:: max(1, len(names) // 4)][:4]


def _hooks(see: Callable[[torch.Tensor], Any]) -> Way:
    @contextlib.contextmanager
    def observing(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            see(output)

        handles = [m.register_forward_hook(hook) for m in model.modules() if not any(True for _ in m.children())]
        yield lambda _: None
        for handle in handles:
            handle.remove()

    return observing


class _Empty(torch.overrides.TorchFunctionMode):
    """A function mode that does nothing: the floor for seeing operations."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function."""
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def _empty_mode(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    modes: list[_Empty] = []

    def before(module: nn.Module, args: Any) -> None:
        modes.append(_Empty())
        modes[-1].__enter__()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        modes.pop().__exit__(None, None, None)

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after, always_call=True)]
    yield lambda _: None
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def _gradient_loop(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    def see(watched: nn.Module) -> None:
        with torch.no_grad():
            for parameter in watched.parameters():
                if parameter.grad is not None:
                    parameter.grad.norm()
                    torch.histc(parameter.grad, 64)

    yield see


ROW_BYTES: Final = 200  # what a row takes in the file that `step()` appends to


def _append_rows(observing: Way) -> Way:
    """Append as many bytes to a file at the end of each step as its rows would take, besides what hooks do."""

    @contextlib.contextmanager
    def appending(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
        rows = bytes(ROW_BYTES * len(_leaf_names(model)))
        with observing(model), tempfile.NamedTemporaryFile(buffering=0) as file:
            yield lambda _: os.write(file.fileno(), rows) and None

    return appending


def _reduction(histogram: bool) -> Callable[[torch.Tensor], Any]:
    """Return a hook's work that is our reduction of a tensor and nothing else: nothing is kept, written or closed."""
    row, counts = np.zeros(1, ROW), np.zeros(BUCKETS, np.uint32)
    out, hist, code = row.ctypes.data, counts.ctypes.data if histogram else 0, DTYPE_CODE["float32"]

    def reduce(output: torch.Tensor, kept: Any = (row, counts)) -> None:
        _kernel.reduce(out, hist, output.data_ptr(), code, output.shape, None)

    return reduce


def _hook_gradient(output: torch.Tensor) -> None:
    """Register an empty hook on the gradient of an output, anew in each call as PyTorch wants it."""
    if output.requires_grad:
        output.register_hook(lambda gradient: None)


@contextlib.contextmanager
def _update_loop(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    """Subtract from every parameter what it was at the end of the step before, and take the norm."""
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def see(watched: nn.Module) -> None:
        with torch.no_grad():
            for old, parameter in zip(before, watched.parameters(), strict=True):
                (parameter - old).norm()
                old.copy_(parameter)

    yield see


@contextlib.contextmanager
def _raw_append(model: nn.Module) -> Iterator[Callable[[nn.Module], None]]:
    """Append the bytes of four outputs to a file at the end of the step, as they are."""
    kept: list[memoryview] = []

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        kept.append(output.detach().clone().reshape(-1).view(torch.uint8).numpy().data)

    handles = [model.get_submodule(name).register_forward_hook(hook) for name in _four_names(model)]
    with tempfile.NamedTemporaryFile(buffering=0) as file:

        def append(_: nn.Module) -> None:
            os.writev(file.fileno(), kept)
            kept.clear()

        yield append
    for handle in handles:
        handle.remove()


WAYS: Final[dict[str, Way]] = {
    "floor: empty hook": _hooks(lambda _: None),
    "floor: one sum in a hook": _hooks(lambda output: output.detach().sum()),
    "floor: one sum and one histc in a hook": _hooks(lambda output: (output.detach().sum(), output.detach().histc(64))),
    "floor: our reduction in a hook": _hooks(_reduction(histogram=False)),
    "floor: our reduction in a hook, rows appended": _append_rows(_hooks(_reduction(histogram=False))),
    "floor: our reduction with histogram in a hook": _hooks(_reduction(histogram=True)),
    "floor: empty function mode": _empty_mode,
    "floor: loop over .grad, norm and histc": _gradient_loop,
    "floor: empty hook on gradients of outputs": _hooks(_hook_gradient),
    "floor: loop over parameters, difference and norm": _update_loop,
    "floor: four tensors appended raw": _raw_append,
    "default": _watch(lambda _: []),
    "outputs": _leaves("output"),
    "outputs + histogram": _leaves("output", BOTH),
    "inputs": _leaves("input"),
    "grad_output": _leaves("grad_output"),
    "param": _parameters("param"),
    "grad": _parameters("grad"),
    "grad + histogram": _parameters("grad", BOTH),
    "update": _parameters("update"),
    "leaves and parameters": _leaves_and_parameters(tt.stats()),
    "leaves and parameters + hash": _leaves_and_parameters([tt.stats(), tt.hash()]),
    "recommended": _watch(lambda _: list(PRESETS["recommended"])),
    "context alone": _watch(lambda _: [tt.probe("**", when=tt.at([10**9]))], context=True),
    "tensortap run": _watch(lambda _: list(probes_for(RunOptions("train.py"))), context=True),
    "op:@matmul": _watch(lambda _: [tt.probe("op:@matmul", keep=tt.stats())]),
    "four whole tensors": _some(tt.full()),
    "four samples": _some(tt.sample(256)),
}


TRAINING_ONLY: Final = (
    "recommended",
    "context alone",
    "tensortap run",
    "grad_output",
    "grad",
    "grad + histogram",
    "update",
    "floor: loop over .grad, norm and histc",
    "floor: empty hook on gradients of outputs",
    "floor: loop over parameters, difference and norm",
)


# What looks at some steps only is judged by stretches of steps; the first stretches, when it looks most, do not count.
STRETCHES: Final = {"context alone": 32, "tensortap run": 32}
