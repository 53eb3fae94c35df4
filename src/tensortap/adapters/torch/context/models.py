"""The models of the training context: names of parameters, modes, configuration, tied weights, buffers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from tensortap.adapters.torch.context.plain import is_plain

_CONFIG: Final = ("p", "eps", "momentum", "affine", "track_running_stats", "dim", "padding_idx", "negative_slope",
                  "batch_first", "num_layers", "dropout", "num_heads", "inplace", "num_embeddings")  # fmt: skip
_MOST_MODULES: Final = 400


class ModelRecord:
    """One model that was called."""

    def __init__(self, root: nn.Module, prefix: str) -> None:
        self.root = weakref.ref(root)
        self.prefix = prefix
        self.kind = type(root).__name__
        self.ties = ties_in(root)
        self.mode: Any = None  # as it was last recorded
        self._modal = [(path, weakref.ref(m)) for path, m in root.named_modules() if _depends_on_mode(m)]
        self.has_modes = bool(self._modal)
        tables = [m for m in root.modules() if isinstance(m, nn.Embedding)]
        self.has_tables = bool(tables)
        self.padding = next((m.padding_idx for m in tables if m.padding_idx is not None), None)
        self._parameters = [(self.name(path), weakref.ref(p)) for path, p in root.named_parameters()]
        self.calls = {"train": 0, "eval": 0, "train_no_grad": 0, "eval_no_grad": 0}

    def name(self, path: str) -> str:
        """Return the name of a parameter or module in the run."""
        return f"{self.prefix}.{path}".rstrip(".") if self.prefix else path

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield its parameters by name, as they were when it was first seen: no step walks the modules."""
        for name, reference in self._parameters:
            if (parameter := reference()) is not None:
                yield name, parameter

    def note_call(self, training: bool, gradients: bool) -> str:
        """Count a call by mode; return the mode."""
        mode = ("train" if training else "eval") + ("" if gradients else "_no_grad")
        self.calls[mode] += 1
        return mode

    def describe(self) -> dict[str, Any]:
        """Return modules that depend on the mode or have options that matter, ties, and what is frozen."""
        root = self.root()
        if root is None:
            return {}
        named = list(root.named_parameters())
        frozen = [self.name(name) for name, p in named if not p.requires_grad]
        kernels = [i for i, (_, p) in enumerate(named, 1) if p.requires_grad and p.dim() > 1]
        modules = list(_configured(root, self.name))[:_MOST_MODULES]
        return {
            "class": self.kind, "parameters": len(named), "frozen": frozen[:40], "frozen_count": len(frozen),
            "last_trained": kernels[-1] / len(named) if kernels else 0.0,  # how far down the list, from 0 to 1
            "modules": modules, "ties": [[self.name(n) for n in names] for names in self.ties],
            "has_modes": self.has_modes, "dtypes": sorted({str(p.dtype).removeprefix("torch.") for _, p in named}),
        }  # fmt: skip

    def describe_mode(self) -> dict[str, Any]:
        """Return which modules are in another mode than the model itself."""
        root = self.root()
        if root is None:
            return {}
        modal = ((path, reference()) for path, reference in self._modal)
        other = [self.name(path) for path, m in modal if m is not None and m.training != root.training]
        return {"training": root.training, "other": other[:20], "other_count": len(other)}

    def broken_ties(self) -> list[list[str]]:
        """Return the names that shared one tensor when the model was first seen and no longer do."""
        root = self.root()
        if root is None:
            return []
        now = dict(root.named_parameters(remove_duplicate=False))
        return [
            [self.name(n) for n in names] for names in self.ties if len({id(now[n]) for n in names if n in now}) > 1
        ]

    def batch_norms(self) -> list[dict[str, Any]]:
        """Return the running statistics of batch normalisation."""
        root = self.root()
        found: list[dict[str, Any]] = []
        for path, module in [] if root is None else root.named_modules():
            variance, mean = getattr(module, "running_var", None), getattr(module, "running_mean", None)
            if isinstance(module, _BatchNorm) and is_plain(variance) and is_plain(mean):
                found.append({
                    "name": self.name(path), "momentum": module.momentum, "training": module.training,
                    "var_min": float(variance.min()), "var_max": float(variance.max()),
                    "mean_max": float(mean.abs().max()),
                    "batches": None if module.num_batches_tracked is None else int(module.num_batches_tracked),
                })  # fmt: skip
        return found[:40]


def ties_in(root: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one and the same."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same for same in names.values() if len(same) > 1]


def _depends_on_mode(module: nn.Module) -> bool:
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return bool(module.dropout)
    return isinstance(module, _BatchNorm) or "DropPath" in type(module).__name__


def _configured(root: nn.Module, name: Any) -> Iterator[dict[str, Any]]:
    for path, module in root.named_modules():
        options = {key: vars(module)[key] for key in _CONFIG if key in vars(module)}
        plain = {k: v for k, v in options.items() if isinstance(v, (int, float, bool, type(None)))}
        if plain or not any(True for _ in module.children()):
            yield {"path": name(path), "type": type(module).__name__, **plain}


def grad_mode() -> bool:
    """Return whether gradients are recorded now."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
