"""Compute the content hash of a tensor inside a graph that XLA compiles, by TensorFlow's operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tensortap.reduce.content_hash import HashOperations, Words, linear_hash


class _TensorflowHashOperations(HashOperations):
    """TensorFlow's operations; words are int64."""

    def padded(self, raw: Any, before: int) -> Any:
        return tf.concat([tf.zeros(before, tf.uint8), raw], 0)

    def lookup(self, table: Words, index: Any) -> Any:
        return tf.gather(tf.constant(table.view(np.int64)), index)

    def bytes_of(self, words: Any) -> Any:
        return tf.reshape(tf.bitcast(words, tf.uint8), [-1])

    def places(self, raw: Any, size: int) -> Any:
        return tf.cast(tf.reshape(raw, [-1, size]), tf.int32) + tf.range(0, 256 * size, 256)

    def folded(self, words: Any) -> Any:
        while (half := words.shape[-1] // 2) >= 1:
            words = tf.bitwise.bitwise_xor(words[..., :half], words[..., half:])
        return words[..., 0]

    def xor(self, a: Any, b: Any) -> Any:
        return tf.bitwise.bitwise_xor(a, b)


def hash_halves(tensor: Any) -> Any:
    """Return the linear hash of a tensor of known shape as two float64: its lower and its upper 32 bits."""
    if tensor.dtype.is_complex:
        tensor = tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1)
    raw = tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tf.bitcast(tensor, tf.uint8)
    raw = tf.reshape(raw, [-1])
    words = linear_hash(_TensorflowHashOperations(), raw, raw.shape[0])
    halves = [words[0], tf.bitwise.right_shift(words[0], tf.constant(32, tf.int64))]
    return tf.cast(tf.bitwise.bitwise_and(tf.stack(halves), tf.constant(0xFFFFFFFF, tf.int64)), tf.float64)
