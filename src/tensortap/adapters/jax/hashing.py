"""Compute the content hash of a tensor inside a step that cannot call the C kernel: by table lookups, in 32 bits."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from tensortap.reduce.content_hash import HashOperations, Words, linear_hash


class _JaxHashOperations(HashOperations):
    """JAX's operations; a word is a pair of 32-bit numbers along the last axis, the lower one first."""

    def padded(self, raw: Any, before: int) -> Any:
        return jnp.pad(raw, (before, 0))

    def lookup(self, table: Words, index: Any) -> Any:
        return jnp.asarray(table.view(np.uint32).reshape(-1, 2))[index]

    def bytes_of(self, words: Any) -> Any:
        return lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)

    def places(self, raw: Any, size: int) -> Any:
        return raw.reshape(-1, size).astype(jnp.int32) + jnp.arange(0, 256 * size, 256, dtype=jnp.int32)

    def folded(self, words: Any) -> Any:
        return lax.reduce(words, np.uint32(0), lax.bitwise_xor, (words.ndim - 2,))


def hash_in_graph(value: Any) -> Any:
    """Return the linear hash of a tensor's bytes as two 32-bit numbers, the lower one first."""
    if jnp.iscomplexobj(value):
        value = jnp.stack([value.real, value.imag], -1)
    raw = value.astype(jnp.uint8) if value.dtype == bool else lax.bitcast_convert_type(value, jnp.uint8)
    return linear_hash(_JaxHashOperations(), raw.reshape(-1), raw.size).reshape(2)
