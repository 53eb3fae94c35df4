"""CRC-32C, the checksum in TensorBoard's event files, by NumPy: a loop in Python would delay the training."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
_POLYNOMIAL: Final = 0x82F63B78
_MASK_DELTA: Final = 0xA282EAD8
_ONES: Final = 0xFFFFFFFF


def crc32c(data: bytes) -> int:
    """Return the checksum of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'

    A checksum is linear: each byte is looked up by itself, then neighbours are joined, pairs, fours, eights at a time.
    """
    if not data:
        return 0
    padding = -len(data) % (1 << (len(data) - 1).bit_length())  # zeros in front change nothing
    words = np.zeros(padding + len(data), np.uint32)
    words[padding:] = _bytewise()[np.frombuffer(data, np.uint8)]
    power = 0
    while len(words) > 1:
        words = _advance(words[0::2], power) ^ words[1::2]
        power += 1
    return int(words[0]) ^ _of_ones(len(data)) ^ _ONES


def masked(data: bytes) -> int:
    """Return the checksum as event files hold it, so that a checksum of checksums is one too."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & _ONES


@cache
def _bytewise() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ _POLYNOMIAL, table >> 1).astype(np.uint32)
    return table


@cache
def _steps(power: int) -> Words:
    """Return what 2^power further bytes make of each byte of a checksum: four tables."""
    places = np.arange(256, dtype=np.uint32)[None, :] << np.array([[0], [8], [16], [24]], np.uint32)
    if power:
        return _advance(_advance(places, power - 1), power - 1)
    tables: Words = _bytewise()[places & 0xFF] ^ places >> 8
    return tables


def _advance(words: Words, power: int) -> Words:
    """Return checksums as they are 2^power zero bytes later."""
    t = _steps(power)
    out: Words = t[0][words & 0xFF] ^ t[1][words >> 8 & 0xFF] ^ t[2][words >> 16 & 0xFF] ^ t[3][words >> 24]
    return out


def _of_ones(length: int) -> int:
    """Return what the ones that a checksum starts from have become after `length` bytes."""
    word = np.array([_ONES], np.uint32)
    for power in range(length.bit_length()):
        if length >> power & 1:
            word = _advance(word, power)
    return int(word[0])
