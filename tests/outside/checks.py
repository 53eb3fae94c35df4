"""The promises, checked on one model: nothing changes, everything that ran is recorded, the numbers are right."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import tensortap as tt

Tensors = dict[str, torch.Tensor]
STEPS = 2
MOST_NESTED = 6


class Subject(NamedTuple):
    """A model and what it is called with, made anew by every call of `make`."""

    name: str
    make: Callable[[], tuple[nn.Module, Any]]
    train: bool = True


class Verdict(NamedTuple):
    """What was found of one subject: `failed` names the promises that did not hold, with the reason."""

    name: str
    failed: Mapping[str, str]
    notes: Mapping[str, str] = {}

    @property
    def passed(self) -> bool:
        """Whether every promise held."""
        return not self.failed


def check(subject: Subject) -> Verdict:
    """Hold one subject to every promise."""
    failed: dict[str, str] = {}
    notes: dict[str, str] = {}
    bare = _outcome(subject, watched=False)
    if _differences(bare.tensors, _outcome(subject, watched=False).tensors):
        notes["same bits"] = "not deterministic by itself"
    else:
        watched = _outcome(subject, watched=True)
        _note(failed, "same bits", _differences(bare.tensors, watched.tensors))
        _note(failed, "nothing left", "" if watched.left == bare.left else "attributes or hooks differ after closing")
    _note(failed, "recorded", _unrecorded(subject))
    _note(failed, "pickle", _pickle_difference(subject))
    gives = any(" output" in name for name in bare.tensors)
    _note(failed, "verify", _verify_problem(subject, notes, gives))
    return Verdict(subject.name, failed, notes)


def _note(failed: dict[str, str], promise: str, problem: str) -> None:
    if problem:
        failed[promise] = problem[:300]


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)  # what models draw from
    random.seed(number)


class _Outcome(NamedTuple):
    tensors: Tensors
    left: Mapping[str, Any]  # what the modules have afterwards


def _outcome(subject: Subject, *, watched: bool) -> _Outcome:
    """Outputs, gradients, weights, buffers and the RNG state after two training steps, or two calls."""
    _seed(0)
    model, batch = subject.make()
    model.train(subject.train)
    tensors: Tensors = {}
    if watched:
        with tt.watch(model, "**", *_parameter_probes(model), to=tt.Memory(), strict=False) as watching:
            _steps(subject, model, batch, tensors, watching.step)
    else:
        _steps(subject, model, batch, tensors, lambda: None)
    return _Outcome(tensors | {"rng": torch.get_rng_state()}, _attributes(model))


def _parameter_probes(model: nn.Module) -> list[str]:
    return ["**:param", "**:grad"] if any(p.requires_grad for p in model.parameters()) else []


def _steps(subject: Subject, model: nn.Module, batch: Any, into: Tensors, close: Callable[[], None]) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad] if subject.train else []
    optimizer = torch.optim.SGD(parameters, lr=1e-3) if parameters else None
    for number in range(STEPS):
        _seed(number)
        output = _call(model, copy.deepcopy(batch), optimizer is not None)
        for name, tensor in _tensors_in(output):
            into[f"step {number} output{name}"] = tensor.detach().clone()
        loss = _loss(output) if optimizer is not None else None
        if optimizer is not None and loss is not None:
            optimizer.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    into[f"step {number} gradient {name}"] = p.grad.detach().clone()
            optimizer.step()
        close()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        into[f"after {name}"] = value.detach().clone()


def _call(model: nn.Module, batch: Any, gradients: bool) -> Any:
    with torch.set_grad_enabled(gradients):
        if isinstance(batch, Mapping):
            return model(**batch)
        return model(*batch) if isinstance(batch, tuple) else model(batch)


def _loss(output: Any) -> torch.Tensor | None:
    parts = [t.float().pow(2).mean() for _, t in _tensors_in(output) if t.requires_grad and t.numel()]
    return sum(parts[1:], parts[0]) if parts else None


def _tensors_in(value: Any, name: str = "", depth: int = 0, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Every tensor inside a value, found by a walk that shares nothing with the one under test."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth > MOST_NESTED or id(value) in seen or value is None or isinstance(value, (str, bytes, int, float, type)):
        return
    seen.add(id(value))
    for key, part in _parts(value):
        yield from _tensors_in(part, f"{name}.{key}", depth + 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(k), v) for k, v in value.items())
    elif isinstance(value, (list, tuple)):
        yield from ((str(i), v) for i, v in enumerate(value))
    elif dataclasses.is_dataclass(value):
        yield from ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, torch.dtype, torch.device)):
        yield from vars(value).items()


def _differences(one: Tensors, other: Tensors) -> str:
    if one.keys() != other.keys():
        return f"other tensors: {sorted(one.keys() ^ other.keys())[:3]}"
    return ", ".join(name for name in one if not _equal(one[name], other[name]))[:200]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or a.layout != torch.strided:
        a, b = (t.to_padded_tensor(0.0) if t.is_nested else t.to_dense() for t in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _attributes(model: nn.Module) -> dict[str, Any]:
    """What hooks and attributes every module has: names, and how many of each kind of hook."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[path] = {
            name: len(v) if "hook" in name and hasattr(v, "__len__") else 0 for name, v in vars(module).items()
        }
        found[f"{path} class"] = type(module).__qualname__
    return found


def _unrecorded(subject: Subject) -> str:
    """Hold what was recorded against what our own hooks saw in the same call: every tensor, every value."""
    _seed(0)
    model, batch = subject.make()
    model.eval()
    expected = _expected(model, copy.deepcopy(batch))
    _seed(0)
    model, batch = subject.make()  # anew, for a call may have changed its state
    model.eval()
    _seed(0)
    memory = tt.Memory()
    with tt.watch(model, "**", to=memory) as watching:
        _call(model, copy.deepcopy(batch), False)
        watching.step()
    counts = dict(watching.counts)
    records: dict[str, list[tt.Record]] = {}
    for record in sorted(memory.records, key=lambda r: r.seq):
        if record.place.port == "output":
            records.setdefault(record.place.site, []).append(record)
    return _compare(expected, records, counts)


def _expected(model: nn.Module, batch: Any) -> dict[str, list[torch.Tensor]]:
    expected: dict[str, list[torch.Tensor]] = {}
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        found = [t.detach().clone() for _, t in _tensors_in(output) if not torch._C._functorch.is_batchedtensor(t)]
        for path in paths[module]:
            expected.setdefault(path, []).extend(found)

    handles = [module.register_forward_hook(hook) for module in paths]
    _seed(0)
    _call(model, batch, False)
    for handle in handles:
        handle.remove()
    return expected


def _compare(
    expected: Mapping[str, list[Any]], records: Mapping[str, list[tt.Record]], counts: Mapping[str, int]
) -> str:
    missing = Counter({path: len(t) - len(records.get(path, ())) for path, t in expected.items()})
    short = {path: n for path, n in missing.items() if n > 0}
    if sum(short.values()) > sum(
        n for name, n in counts.items() if "skipped" in name or name in ("unseen", "not_entered")
    ):
        return (
            f"{sum(short.values())} tensors neither recorded nor counted, of {list(short)[:3]}; counts {dict(counts)}"
        )
    for path, tensors in expected.items():
        found = records.get(path, [])
        if len(found) == len(tensors):
            for record, tensor in zip(found, tensors, strict=True):
                if wrong := _wrong(record, tensor):
                    return f"{path}: {wrong}"
    return ""


def _wrong(record: tt.Record, tensor: torch.Tensor) -> str:
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_complex():
        return ""
    if tuple(record["shape"]) != tuple(tensor.shape):
        return f"shape {record['shape']} for {tuple(tensor.shape)}"
    values = tensor.double()
    finite = values[torch.isfinite(values)]
    if int(record["nan"]) != int(torch.isnan(values).sum()):
        return f"nan {record['nan']}"
    if not finite.numel():
        return ""
    truth = {"min": finite.min().item(), "max": finite.max().item(), "mean": finite.mean().item()}
    scale = finite.abs().mean().item()
    for name, value in truth.items():
        allowed = 0.0 if name != "mean" else 1e-9 * scale + 1e-300
        if not math.isclose(record[name], value, rel_tol=1e-12, abs_tol=allowed):
            return f"{name} {record[name]!r} for {value!r}"
    return ""


def _pickle_difference(subject: Subject) -> str:
    _seed(0)
    model, _ = subject.make()
    try:
        before, again = _pickled(model), _pickled(model)
    except Exception:
        return ""  # this model cannot be pickled by itself
    if before != again:
        return ""
    with tt.watch(model, "**", to=tt.Memory()):
        try:
            under = _pickled(model)
        except Exception as error:
            return f"pickling under a tap raises {type(error).__name__}: {error}"
    return "" if under == before else "the pickle made under a tap differs"


def _pickled(model: nn.Module) -> bytes:
    file = io.BytesIO()
    pickle.Pickler(file, protocol=4).dump(model)
    return file.getvalue()


def _verify_problem(subject: Subject, notes: dict[str, str], gives: bool) -> str:
    _seed(0)
    model, batch = subject.make()
    model.eval()
    found = tt.verify(model, batch, repeats=1)
    text = str(found)
    if "nothing to compare" in text:
        return "verify found nothing to compare" if gives else ""  # which is right where nothing is given
    if not found and "determin" in text:
        notes["verify"] = "not deterministic by itself"
        return ""
    return "" if found else text.splitlines()[0]
