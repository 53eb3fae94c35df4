"""Compute the content hash of a tensor on its device, by PyTorch's operations. Nothing here waits for the device."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from tensortap.reduce.content_hash import HashOperations, Words, linear_hash_in_pieces

_PIECE: Final = 1 << 23  # bytes whose lookups are in memory at once
_TABLES: Final[dict[tuple[int, torch.device], Tensor]] = {}


class _TorchHashOperations(HashOperations):
    """PyTorch's operations; words are int64."""

    def padded(self, raw: Tensor, before: int) -> Tensor:
        return torch.cat([raw.new_zeros(before), raw])

    def lookup(self, table: Words, index: Tensor) -> Tensor:
        key = (id(table), index.device)  # the tables are kept for the whole process
        if key not in _TABLES:
            _TABLES[key] = torch.from_numpy(table.view(np.int64)).to(index.device)
        return _TABLES[key][index]

    def bytes_of(self, words: Tensor) -> Tensor:
        return (words.unsqueeze(-1) >> torch.arange(0, 64, 8, device=words.device)) & 255

    def places(self, raw: Tensor, size: int) -> Tensor:
        return raw.reshape(-1, size).long() + torch.arange(0, 256 * size, 256, device=raw.device)

    def folded(self, words: Tensor) -> Tensor:
        while (half := words.shape[-1] // 2) >= 1:
            words = words[..., :half] ^ words[..., half:]
        return words[..., 0]


def linear_hash_on_device(plain: Tensor) -> Tensor:
    """Return the linear hash of a tensor's bytes in C order, as an int64 on its device."""
    dense = plain.contiguous()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    raw = real.view(-1).view(torch.uint8)
    words: Tensor = linear_hash_in_pieces(_TorchHashOperations(), raw, raw.numel(), _PIECE)
    return words[0]
