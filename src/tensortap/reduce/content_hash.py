"""The content hash: CRC-64/XZ over the bytes of a tensor's elements, in C order.

A CRC is linear over GF(2): the hash of a whole follows from those of its pieces (`combine`), and so it can be taken by
lookups and exclusive-ors of many bytes at once. `linear_hash` is written once against the few operations that NumPy,
PyTorch, JAX and TensorFlow share. A 64-bit word is a polynomial with the highest power in its lowest bit; "linear"
means without the ones that CRC-64/XZ begins and ends with.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

ABSENT: Final = -(2**63)
"""In memory, a row's hash that was not asked for; in files it is null."""
_POLYNOMIAL: Final = 0xC96C5795D7870F42
_ONES: Final = 2**64 - 1
GROUP: Final = 64
"""Bytes whose lookups are combined first. Zeros before all bytes change nothing, so data is padded there."""
Words = npt.NDArray[np.uint64]


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the hash of two consecutive pieces, from their hashes and the size of the second one.

    >>> from tensortap.reduce.summary import summarize
    >>> a, b = np.arange(5.0), np.arange(7.0)
    >>> whole = summarize(np.concatenate([a, b]), hash=True).hash
    >>> combine(summarize(a, hash=True).hash, summarize(b, hash=True).hash, b.nbytes) == whole
    True
    """
    return _signed(_before(first & _ONES, second_bytes) ^ (second & _ONES))


def finished(linear: int, nbytes: int) -> int:
    """Return the hash, as a signed number, from the linear hash of so many bytes."""
    return _signed(_before(_ONES, nbytes) ^ linear ^ _ONES)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _times(a: int, b: int) -> int:
    product = 0
    for i in range(63, -1, -1):
        if a >> i & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _before(linear: int, nbytes: int) -> int:
    """Return a linear hash after this many further zero bytes."""
    return _times(_power(nbytes), linear) if nbytes else linear


@cache
def _power(nbytes: int) -> int:
    if nbytes == 1:
        return 1 << 55  # x^8
    half = _power(nbytes // 2)
    square = _times(half, half)
    return _times(square, 1 << 55) if nbytes % 2 else square


# --- lookups -----------------------------------------------------------------------------------


@cache
def byte_table() -> Words:
    """Return the contribution of each byte to the linear hash of its group, by its place in the group and its value."""
    table = np.zeros((GROUP, 256), np.uint64)
    state = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        state = (state >> np.uint64(1)) ^ np.where(state & np.uint64(1), np.uint64(_POLYNOMIAL), np.uint64(0))
    for place in range(GROUP - 1, -1, -1):
        table[place] = state
        state = table[GROUP - 1][(state & np.uint64(255)).astype(np.intp)] ^ (state >> np.uint64(8))
    return table.reshape(-1)


@cache
def word_table(nbytes: int) -> Words:
    """Return a linear hash after this many further zero bytes, as tables by its eight bytes and their values."""
    table = np.zeros((8, 256), np.uint64)
    for bit in range(64):
        image, byte, of = np.uint64(_before(1 << bit, nbytes)), bit // 8, 1 << bit % 8
        for value in range(256):
            if value & of:
                table[byte, value] ^= image
    return table.reshape(-1)


class HashOperations(Protocol):
    """A framework's operations on arrays of integers. Words may be pairs of halves where there are no 64 bits."""

    def padded(self, raw: Any, before: int) -> Any:
        """Return the bytes with so many zeros before them."""

    def lookup(self, table: Words, index: Any) -> Any:
        """Return words of a table."""

    def bytes_of(self, words: Any) -> Any:
        """Return the bytes of words, lowest first, as one run."""

    def places(self, raw: Any, size: int) -> Any:
        """Return the bytes in groups of `size` (the last axis), plus 256 times their place in the group, as indices."""

    def folded(self, words: Any) -> Any:
        """Return the exclusive or of the words along the last axis, whose length is a power of two."""

    def even(self, words: Any) -> Any:
        """Return every other word, from the first."""
        return words[::2]

    def odd(self, words: Any) -> Any:
        """Return every other word, from the second."""
        return words[1::2]

    def xor(self, a: Any, b: Any) -> Any:
        """Return the exclusive or of words."""
        return a ^ b


def linear_hash(ops: HashOperations, raw: Any, nbytes: int) -> Any:
    """Return the linear hash of bytes, as an array of one word."""
    whole = max(1 << max(nbytes - 1, 0).bit_length(), GROUP)
    words = ops.folded(ops.lookup(byte_table(), ops.places(ops.padded(raw, whole - nbytes), GROUP)))
    size = GROUP
    while size < whole:
        moved = ops.lookup(word_table(size), ops.places(ops.bytes_of(ops.even(words)), 8))
        words, size = ops.xor(ops.folded(moved), ops.odd(words)), 2 * size
    return words


def linear_hash_in_pieces(ops: HashOperations, raw: Any, nbytes: int, piece: int) -> Any:
    """Return the same, by pieces of so many bytes (a power of two), which bounds the memory that lookups take."""
    first = nbytes % piece or min(nbytes, piece)
    words = linear_hash(ops, raw[:first], first)
    for begin in range(first, nbytes, piece):
        moved = ops.folded(ops.lookup(word_table(piece), ops.places(ops.bytes_of(words), 8)))
        words = ops.xor(moved, linear_hash(ops, raw[begin : begin + piece], piece))
    return words


class _NumPy(HashOperations):
    def padded(self, raw: Any, before: int) -> Any:
        return np.concatenate([np.zeros(before, np.uint8), raw])

    def lookup(self, table: Words, index: Any) -> Any:
        return table[index]

    def bytes_of(self, words: Any) -> Any:
        return np.ascontiguousarray(words).astype("<u8").view(np.uint8)

    def places(self, raw: Any, size: int) -> Any:
        return raw.reshape(-1, size) + np.arange(0, 256 * size, 256, dtype=np.intp)

    def folded(self, words: Any) -> Any:
        return np.bitwise_xor.reduce(words, axis=-1)


def hash_of_bytes(raw: npt.NDArray[np.uint8]) -> int:
    """Return the hash of bytes, by NumPy."""
    return finished(int(linear_hash_in_pieces(_NumPy(), raw, raw.size, 1 << 20)[0]), raw.size)
