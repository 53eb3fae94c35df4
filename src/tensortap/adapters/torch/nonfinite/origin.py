"""Locate where a NaN or an infinity was made: the module, the operation in it, its line, its inputs, and why.

Forward: modules are watched as they run; the first to finish with finite inputs and a non-finite output is run
under a function mode that looks at every operation. Backward: every node of the graph is watched; the first with
finite gradients coming in and non-finite ones going out is the origin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tensortap.adapters.results import Origin, TensorSummary
from tensortap.adapters.torch.distributed.shards import local_of
from tensortap.adapters.torch.modules.nested import inputs_in, tensors_in
from tensortap.adapters.torch.modules.tensors import without_torch_function
from tensortap.adapters.torch.nonfinite.reasons import operation_name, why
from tensortap.adapters.torch.ops.names import op_name, returns_no_tensor
from tensortap.adapters.torch.source import OURS, TORCH, current_line
from tensortap.adapters.torch.state import as_step, preserved
from tensortap.reduce.summary import summarize

_MASKS: Final = 64  # calls of modules that return −inf on purpose, before the search goes on to backward


def locate(model: nn.Module, batch: Any) -> Origin | None:
    """Run a step (forward and backward) and find the first non-finite value; the model is left as it was."""
    run = as_step(model, batch)
    masks: set[tuple[nn.Module, int]] = set()
    with preserved(model) as restore:
        for _ in range(_MASKS):
            restore()
            forward = _watch_forward(model, run, masks)
            if forward is None:
                break
            restore()
            if (origin := _look_inside(run, *forward)) is not None:
                return origin
            masks.add(forward[1:])
        restore()
        return _watch_backward(model, run)


def _watch_forward(
    model: nn.Module, run: Callable[[], Any], masks: Container[tuple[nn.Module, int]]
) -> tuple[str, nn.Module, int] | None:  # fmt: skip
    """Return the first module that made a non-finite output of finite inputs, and the number of its call."""
    found: list[tuple[str, nn.Module, int]] = []
    calls: dict[nn.Module, int] = {}
    names = {module: path for path, module in model.named_modules()}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = calls[module] = calls.get(module, -1) + 1
        if not found and (module, call) not in masks and is_born_in((args, kwargs), output):
            found.append((names[module], module, call))

    with _hooks([module.register_forward_hook(after, with_kwargs=True) for module in names]):
        try:
            run()
        except Exception:  # errors that the user's step raises because of a NaN are ignored here
            if not found:
                raise
    return found[0] if found else None


def _look_inside(run: Callable[[], Any], path: str, module: nn.Module, call: int) -> Origin | None:
    """Run again, looking at every operation while that module runs for that time. None: it only masks with −inf."""
    operations = OriginMode(path, module)
    calls = [-1]
    given: list[TensorSummary] = []
    worse = [True]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[0] += 1
        if calls[0] == call:
            given.extend(
                TensorSummary(slot, summary_of_values(t)) for slot, t in inputs_in(module.forward, args, kwargs)
            )
            operations.__enter__()

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if calls[0] == call and operations.entered:
            operations.__exit__(None, None, None)
            worse[0] = not is_sound(output)

    with (
        _hooks(
            [
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
                module.register_forward_hook(after, always_call=True, prepend=True),
            ]
        ),
        _ignored(),
    ):
        run()
    weights = nonfinite_parameter(module)
    if operations.origin is None and operations.asked and not weights and not worse[0]:
        return None
    return operations.origin or Origin(
        "forward", path, type(module).__name__, call=call, inputs=tuple(given), why=weights
    )


class OriginMode(TorchFunctionMode):
    """Examine every operation for the first that makes a non-finite value out of finite ones."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.module = module
        self.origin: Origin | None = None
        self.entered = False
        self.asked = False  # whether the user gave an infinity as a number, as masks do

    def __enter__(self) -> OriginMode:
        self.entered = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        self.entered = False
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.origin is not None or returns_no_tensor(op_name(function)):
            return function(*args, **kwargs)
        tensors = [*tensors_in(tuple(args)), *tensors_in(kwargs)]
        given = [TensorSummary(slot, summary_of_values(t)) for slot, t in tensors if t.is_floating_point()]
        copies = [t.detach().clone() if isinstance(t, Tensor) else t for t in args]
        output = function(*args, **kwargs)
        if _is_new(given, output):
            if _asked_for(args, kwargs, output):
                self.asked = True
            else:
                self._found(function, given, copies, kwargs, output)
        return output

    def _found(
        self, function: Any, given: list[TensorSummary], args: list[Any], kwargs: dict[str, Any], output: Any
    ) -> None:
        bad = next(t for _, t in tensors_in(output) if not is_finite(t))
        with without_torch_function():
            reason = nonfinite_parameter(self.module) or why(function, args, kwargs, bad.detach())
        self.origin = Origin(
            "forward",
            self.path,
            type(self.module).__name__,
            operation=operation_name(function),
            source=current_line(),
            inputs=tuple(given),
            output=summary_of_values(bad),
            why=reason,
        )


def _is_new(given: list[TensorSummary], output: Any) -> bool:
    """Return the result of `is_born_in` for the inputs as they were before an operation that may change them."""
    if is_finite(output) or any(seen.summary.nan or seen.summary.posinf for seen in given):
        return False
    return not any(seen.summary.neginf for seen in given) or not is_sound(output)


def _watch_backward(model: nn.Module, run: Callable[[], Any]) -> Origin | None:
    """Return the first node that turns finite gradients into non-finite ones, and the module that made the node."""
    owners: list[tuple[int, int, str, str]] = []
    started: list[int] = []
    found: list[Origin] = []

    def before(module: nn.Module, args: Any) -> None:
        started.append(torch._C._autograd._get_sequence_nr())

    names = {module: path for path, module in model.named_modules()}

    def after(module: nn.Module, args: Any, output: Any) -> None:
        first = started.pop()
        owners.append((first, torch._C._autograd._get_sequence_nr(), names[module], type(module).__name__))

    def at_node(node: Any, outgoing: Sequence[Any], incoming: Sequence[Any]) -> None:
        if found or is_finite(list(outgoing)) or not is_finite(list(incoming)):
            return
        path, kind = _owner(owners, node._sequence_nr())
        seen = tuple(TensorSummary(f"[{i}]", summary_of_values(g)) for i, g in enumerate(incoming) if g is not None)
        bad = next(g for g in outgoing if g is not None and not is_finite(g))
        found.append(
            Origin(
                "backward", path, kind, operation=node.name(), source=_forward_source(node), inputs=seen,
                output=summary_of_values(bad), why=_backward_why(node),
            )
        )  # fmt: skip

    handles = [m.register_forward_pre_hook(before, prepend=True) for m in names]
    handles += [m.register_forward_hook(after, always_call=True) for m in names]
    with _hooks(handles), torch.autograd.set_detect_anomaly(True, check_nan=False), _backward_watched(at_node):
        run()
    return found[0] if found else None


@contextmanager
def _backward_watched(at_node: Callable[[Any, Sequence[Any], Sequence[Any]], None]) -> Iterator[None]:
    """Put hooks on the graph of every tensor on which backward is called inside the block."""
    original = torch.autograd.backward

    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        for node in _graph([t.grad_fn for _, t in tensors_in(tensors)]):
            node.register_hook(lambda outgoing, incoming, node=node: at_node(node, outgoing, incoming))
        original(tensors, *args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


def _graph(roots: list[Any]) -> Iterator[Any]:
    seen: set[Any] = set()
    queue = [root for root in roots if root is not None]
    while queue:
        node = queue.pop()
        if node not in seen:
            seen.add(node)
            yield node
            queue.extend(n for n, _ in node.next_functions if n is not None)


def _owner(owners: list[tuple[int, int, str, str]], number: int) -> tuple[str, str]:
    """Return the innermost module whose forward made the node."""
    inside = [(last - first, path, kind) for first, last, path, kind in owners if first <= number < last]
    if not inside:
        return "(outside the model)", ""
    _, path, kind = min(inside)
    return path, kind


def _backward_why(node: Any) -> str:
    name = node.name()
    if name.startswith("Sqrt"):
        return "the derivative of sqrt at 0 is infinite"
    if name.startswith(("Log", "Div", "Reciprocal", "Rsqrt")):
        return "the derivative divides by a value that is 0 or too small"
    if name.startswith(("LinalgVectorNorm", "Norm")):
        return "the derivative of a norm at 0 is not defined"
    if name.startswith("Pow"):
        return "the derivative of the power at 0 is infinite"
    return ""


def _forward_source(node: Any) -> str:
    """Return the line that made a node, which anomaly mode keeps as text."""
    lines = node.metadata.get("traceback_", [])
    frames = [line.strip() for line in lines if TORCH not in line and OURS not in line]
    if not frames:
        return ""
    place, _, code = frames[-1].partition("\n")
    parts = place.replace('File "', "").replace('", line ', ":").partition(", in ")
    return f"{parts[0]}  {code.strip()}"


def _asked_for(args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> bool:
    """Return whether the user gave the infinity as a number: a mask of −inf is no fault, unless it makes a NaN."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, float) and not math.isfinite(value)]
    return bool(given) and (any(map(math.isnan, given)) or not _has_nan(output))


def _has_nan(value: Any) -> bool:
    with without_torch_function():
        return any(bool(torch.isnan(local_of(t)).any()) for _, t in tensors_in(value) if t.is_floating_point())


def nonfinite_parameter(module: nn.Module) -> str:
    """Return a sentence that names the first parameter that is not finite; empty when all are."""
    bad = [name for name, p in module.named_parameters() if not is_finite(p)]
    return f"its parameter {bad[0]} is not finite" if bad else ""


def is_finite(value: Any) -> bool:
    """Return whether every floating-point tensor in a value is finite."""
    with without_torch_function():
        parts = (local_of(t) for _, t in tensors_in(value) if t.is_floating_point())  # asking a DTensor is a collective
        return all(bool(torch.isfinite(part).all()) for part in parts)


def is_born_in(given: Any, output: Any) -> bool:
    """Return whether an output is not finite and no input is. An input may be a mask of −inf."""
    if is_finite(output):
        return False
    return is_finite(given) or (is_sound(given) and not is_sound(output))


def is_sound(value: Any) -> bool:
    """Return whether there is nothing worse than −inf in a value."""
    with without_torch_function():
        parts = (local_of(t) for _, t in tensors_in(value) if t.is_floating_point())
        return not any(bool((torch.isnan(part) | torch.isposinf(part)).any()) for part in parts)


def summary_of_values(tensor: Tensor) -> Any:
    """Return the statistics of this rank's part of a tensor, without its histogram."""
    with without_torch_function():
        return summarize(local_of(tensor), histogram=False)


@contextmanager
def _hooks(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _ignored() -> Iterator[None]:
    try:
        yield
    except Exception:  # the first run showed all there is; the user's own error comes from their own step
        return
