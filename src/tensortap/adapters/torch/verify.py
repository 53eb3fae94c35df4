"""The proof on the user's own model: the same bits with and without taps, nothing left over, and the cost."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensortap.adapters.results import Verification
from tensortap.adapters.torch.calls import as_step
from tensortap.adapters.torch.state import preserved
from tensortap.adapters.torch.walk import tensors_in

Tensors = dict[str, Tensor]


def verify(
    model: nn.Module, batch: Any, probes: Sequence[Any], repeats: int, watch: Callable[..., Any]
) -> Verification:
    """Run with and without taps from one seed and state, and compare."""
    run = as_step(model, batch)
    with preserved(model) as restore:
        bare = _observe(model, run, restore)
        again = _observe(model, run, restore)
        before = _traces(model)
        with tempfile.TemporaryDirectory(prefix="tensortap-verify-") as folder:
            with watch(model, *probes, to=f"{folder}/run", strict=True) as tap:
                tapped = _observe(model, run, restore)
                tap.step()
            left = tuple(_difference(before, _traces(model)))
            records = len(tap.run.table(columns=["step"]))
            unseen = tap.run.info.get("unseen", {})
            nbytes = sum(file.stat().st_size for file in Path(folder).rglob("seg-*.parquet"))
            ratio = _ratio(lambda to: watch(model, *probes, to=to), run, restore, repeats, folder)
    deterministic = not _unequal(bare, again)
    wrong = _unequal(bare, tapped) if deterministic else []
    outputs = [name for name in wrong if not name.startswith("grad ")]
    return Verification(
        deterministic=deterministic,
        same_outputs=not outputs,
        same_gradients=len(outputs) == len(wrong),
        left_behind=left,
        ratio=ratio,
        bytes_per_step=nbytes,
        records=records,
        unseen=unseen,
        differences=tuple(_describe(name, bare, tapped) for name in wrong),
    )


def _observe(model: nn.Module, run: Callable[[], Any], restore: Callable[[], None]) -> Tensors:
    """What a run leaves: outputs, gradients, buffers, parameters and the random state."""
    restore()
    seen = {f"output{slot}": t.detach().clone() for slot, t in tensors_in(run())}
    seen |= {f"grad {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    seen |= {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}
    seen["random state"] = torch.get_rng_state()
    return seen


def _ratio(
    watch: Callable[[str], Any], run: Callable[[], Any], restore: Callable[[], None], repeats: int, folder: str
) -> float:
    """Time with taps over time without, measured in turn, each after a run that is not counted."""
    bare, tapped = [], []
    for i in range(repeats):
        _time(run, restore)
        bare.append(_time(run, restore))
        with watch(f"{folder}/timed{i}") as tap:
            _time(run, restore, tap.step)
            tapped.append(_time(run, restore, tap.step))
    return statistics.median(tapped) / statistics.median(bare)


def _time(run: Callable[[], Any], restore: Callable[[], None], then: Callable[[], None] = lambda: None) -> float:
    restore()
    start = time.perf_counter()
    run()
    then()
    return time.perf_counter() - start


def _traces(model: nn.Module) -> dict[str, Any]:
    """Everything a careless tap could leave on a model."""
    return {
        f"{path or '(root)'}.{name}": list(value) if isinstance(value, dict) else type(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
    } | {
        **{f"{name} hooks": list(p._backward_hooks or ()) for name, p in model.named_parameters()},
        "function modes": torch._C._len_torch_function_stack(),
    }


def _difference(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            yield name


def _unequal(a: Tensors, b: Tensors) -> list[str]:
    return [name for name in dict.fromkeys([*a, *b]) if name not in a or name not in b or not _same(a[name], b[name])]


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN equal to the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return torch.equal(a.to_dense(), b.to_dense())
    flat = (a.contiguous().reshape(-1), b.contiguous().reshape(-1))
    return torch.equal(*(t.view(torch.uint8) if t.numel() else t for t in flat))


def _describe(name: str, bare: Tensors, tapped: Tensors) -> str:
    if name not in bare or name not in tapped:
        return f"{name}: only {'with' if name in tapped else 'without'} taps"
    apart = (bare[name].double() - tapped[name].double()).abs().max() if bare[name].shape == tapped[name].shape else "?"
    return f"{name}: differs by at most {apart}"
