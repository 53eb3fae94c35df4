"""Describe a call of a loss function: its input, its target, the operation behind the input, and the loss of
guessing.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.context.graph import NameOf, nearest_parameter, operations_before, softmax_axes
from tensortap.adapters.torch.context.plain import is_plain

NAMES: Final = (
    "cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "cosine_embedding_loss", "margin_ranking_loss",
    "triplet_margin_loss", "hinge_embedding_loss", "ctc_loss", "poisson_nll_loss", "gaussian_nll_loss",
    "multi_margin_loss", "multilabel_margin_loss", "soft_margin_loss", "multilabel_soft_margin_loss",
)  # fmt: skip
_MOST: Final = 16_384  # elements that are looked at; of larger tensors so many, evenly spaced
_OPTIONS: Final = ("reduction", "ignore_index", "label_smoothing", "log_target", "log_input", "margin", "blank")


def describe_call(function: Any, args: Any, kwargs: Any, output: Any, name_of: NameOf) -> dict[str, Any]:
    """Return the arguments of a loss as plain values."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    first, target = [*given.values(), None, None][:2]
    data: dict[str, Any] = {name: given[name] for name in _OPTIONS if name in given}
    data["train"] = torch.is_grad_enabled()
    data |= {name: describe(given[name]) for name in ("weight", "pos_weight") if isinstance(given.get(name), Tensor)}
    if isinstance(first, Tensor):
        data["input"] = describe(first) | sums_to_one(first)
        data["requires_grad"] = first.requires_grad
        data["operations"] = operations_before(first)
        data["softmax"] = softmax_axes(first)
        data["produced_by"] = nearest_parameter(first, name_of)
    if isinstance(target, Tensor):
        data["target"] = _describe_target(target, given.get("ignore_index"))
        data["target_requires_grad"] = target.requires_grad
    if isinstance(output, Tensor) and output.numel() and is_plain(output):
        data["value"] = float(output.detach().float().mean())
    if isinstance(first, Tensor) and isinstance(target, Tensor):
        data["chance"] = _chance(function.__name__, first, data["target"])
    return data


def describe(tensor: Tensor) -> dict[str, Any]:
    """Return shape, dtype and range."""
    found: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    if not tensor.numel() or tensor.is_complex() or not is_plain(tensor):
        return found
    values = sampled(tensor).double()
    finite = values[torch.isfinite(values)]
    found["nonfinite"] = values.numel() - finite.numel()
    if finite.numel():
        low, high = torch.aminmax(finite)
        mean = finite.mean()
        found |= {"min": float(low), "max": float(high), "mean": float(mean)}
        found["std"] = float((finite - mean).square().mean().sqrt())
    return found


def sampled(tensor: Tensor, most: int = _MOST) -> Tensor:
    """Return at most so many elements, evenly spaced, on the CPU."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, math.ceil(flat.numel() / most))].cpu()


def sums_to_one(tensor: Tensor) -> dict[str, Any]:
    """Return the axis along which a tensor sums to one (probabilities), and the one along which its exp does
    (log-probabilities).
    """
    if tensor.dim() < 2 or not tensor.is_floating_point() or tensor.numel() > 1 << 20 or not is_plain(tensor):
        return {}
    values = tensor.detach().double()
    found: dict[str, Any] = {}
    if bool((values >= 0).all()):
        found["sums_to_one"] = [axis for axis in range(tensor.dim()) if _ones(values.sum(axis), tensor.shape[axis])]
    elif bool((values <= 0).all()):
        found["exp_sums_to_one"] = [a for a in range(tensor.dim()) if _ones(values.exp().sum(a), tensor.shape[a])]
    return found


def _ones(sums: Tensor, length: int) -> bool:
    return length > 1 and bool(((sums - 1).abs() < 1e-2).all())


def _describe_target(target: Tensor, ignore: Any) -> dict[str, Any]:
    found = describe(target)
    if not target.numel() or not is_plain(target):
        return found
    values = sampled(target, 1 << 16)
    if not target.is_floating_point():
        kept = values[values != ignore] if isinstance(ignore, int) else values
        classes, counts = torch.unique(kept, return_counts=True)
        found["ignored"] = 1 - kept.numel() / values.numel()
        if kept.numel():
            found["classes"] = int(classes.numel())
            found["share"] = float(counts.max() / counts.sum())
            found["most"] = int(classes[counts.argmax()])
            shares = counts.double() / counts.sum()
            found["entropy"] = float(-(shares * shares.log()).sum())
            found["counts"] = {int(c): int(n) for c, n in zip(classes[:64], counts[:64], strict=True)}
    else:
        found["binary"] = bool(((values == 0) | (values == 1)).all())
        found["distinct"] = int(torch.unique(values[:1024]).numel())
        if target.dim() > 1 and target.shape[-1] > 1 and target.numel() <= 1 << 20:
            sums = target.detach().double().sum(-1)
            found["row_sums"] = [float(sums.min()), float(sums.max())]
    return found


def _chance(name: str, first: Tensor, target: dict[str, Any]) -> float | None:
    """Return the loss of the best constant prediction for this batch."""
    if name in ("cross_entropy", "nll_loss") and "entropy" in target:
        return float(target["entropy"])
    if name in ("mse_loss",) and target.get("std") is not None:
        return float(target["std"]) ** 2
    if name.startswith("binary_cross_entropy") and 0 < target.get("mean", 0) < 1:
        mean = float(target["mean"])
        return -mean * math.log(mean) - (1 - mean) * math.log(1 - mean)
    return None
