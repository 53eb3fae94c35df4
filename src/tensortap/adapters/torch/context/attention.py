"""Read about attention from the graph of a loss: which positions look at which, and how targets relate to the
inputs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import torch
from torch import Tensor

from tensortap.adapters.torch.context.graph import NameOf, NodeOutput, nearest_parameter
from tensortap.adapters.torch.context.plain import is_plain

_MOST_ELEMENTS: Final = 1 << 20
_FUSED: Final = "ScaledDotProduct"
_SEEN: Final = 1e-4  # a share of the weights that counts as looking


def describe_attention(
    nodes: list[Any], upright: Collection[Any], ids: Tensor | None, padding: int | None, name_of: NameOf
) -> list[dict[str, Any]]:
    """Return for each attention in a graph how much of it looks ahead, and how much at padding.

    `upright` are those whose weights are summed over their last axis, that of the keys.
    """
    found = []
    for node in nodes:
        try:
            weights = _weights(node)
        except RuntimeError:  # the tensors that autograd saved were freed, or changed in place
            continue
        if weights is not None:
            found.append(
                _describe(node, weights, ids, padding)
                | {"site": nearest_parameter(NodeOutput(node), name_of), "upright": node in upright}
            )
    return found


def _weights(node: Any) -> Tensor | None:
    """Return the weights, (…, query, key), of a softmax or, computed again, of a fused attention."""
    if not node.name().startswith(_FUSED):
        result = node._saved_result
        return result.detach() if is_plain(result) and result.dim() > 2 and result.numel() <= _MOST_ELEMENTS else None
    query, key = node._saved_query, node._saved_key
    mask, scale = getattr(node, "_saved_attn_mask", None), node._saved_scale
    size = query.shape[:-1].numel() * key.shape[-2]
    if not is_plain(query) or not is_plain(key) or size > _MOST_ELEMENTS or query.shape[1] != key.shape[1]:
        return None
    with torch.no_grad():
        scores = query.detach().float() @ key.detach().float().transpose(-2, -1)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if node._saved_is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.float()
        found: Tensor = scores.softmax(-1).nan_to_num()
        return found


def _describe(node: Any, weights: Tensor, ids: Tensor | None, padding: int | None) -> dict[str, Any]:
    data: dict[str, Any] = {"shape": list(weights.shape)}
    axis = getattr(node, "_saved_dim", None)
    if axis is not None:
        axis = int(axis) - (1 << 64) if int(axis) >= 1 << 63 else int(axis)
        data["axis"] = axis % weights.dim()
    total = float(weights.sum())
    queries, keys = weights.shape[-2:]
    if queries == keys > 2 and total:
        data["ahead"] = float(weights.triu(1).sum()) / total
    if padding is not None and ids is not None and total and ids.shape[1] == keys and weights.shape[0] % len(ids) == 0:
        data |= _at_padding(weights, ids == padding)
    return data


def _at_padding(weights: Tensor, padded: Tensor) -> dict[str, Any]:
    """Return how much of the weights of other queries lies on keys that are padding, and the share of padding."""
    by_sample = weights.reshape(len(padded), -1, *weights.shape[-2:])
    on_padding = (by_sample * padded[:, None, None, :]).sum(-1)
    asking = (~padded if weights.shape[-2] == padded.shape[1] else torch.ones_like(padded[:, :1]))[:, None, :]
    kept = on_padding[asking.expand_as(on_padding)]
    return {"padding": float(padded.double().mean()), "at_padding": float(kept.mean()) if kept.numel() else 0.0}


def relation_to_inputs(target: Tensor, ids: Tensor, ignore: Any) -> int | None:
    """Return by how many positions targets are shifted against the input tokens; None if they are other tokens.

    >>> ids = torch.arange(40).reshape(2, 20)
    >>> relation_to_inputs(ids[:, 1:].reshape(-1), ids, -100), relation_to_inputs(ids.reshape(-1), ids, -100)
    (1, 0)
    """
    rows, length = ids.shape
    flat = target.detach().reshape(-1)
    if not rows or flat.numel() % rows or target.is_floating_point() or not is_plain(target) or not is_plain(ids):
        return None
    width = flat.numel() // rows
    if not length - 2 <= width <= length or width < 4:
        return None
    grid = flat.view(rows, width)
    for shift in range(3):
        kept = min(width, length - shift)
        a, b = grid[:, :kept], ids.detach()[:, shift : shift + kept]
        counted = a != (ignore if isinstance(ignore, int) else -100)
        known = int(counted.sum())
        if known >= 16 and int(((a == b) & counted).sum()) >= 0.98 * known and len(torch.unique(a[counted])) > 2:
            return shift
    return None
