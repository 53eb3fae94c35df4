"""The contract's network in Keras, on TensorFlow."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow says much when it starts

import keras
import numpy as np
import reference
import tensorflow as tf

import tensortap as tt


class Split(keras.layers.Layer):
    def call(self, h):
        half = reference.WIDTH // 2
        return {"left": h[:, :half], "right": (h[:, half:], keras.ops.sum(h, 1))}


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.fc1 = dense("fc1")
        self.act = keras.layers.ReLU()
        self.blocks = [dense("blocks.0"), dense("blocks.1")]
        self.split = Split()
        self.tied = self.blocks[0]
        self.head = dense("head")
        self.broken = False

    def call(self, x):
        h = self.act(self.fc1(x))
        for block in self.blocks:
            h = self.act(block(h))
        if self.broken:
            raise ValueError("broken on demand")
        parts = self.split(h)
        return self.head(self.tied(keras.ops.concatenate([parts["left"], parts["right"][0]], 1)))


def dense(name):
    weight, bias = reference.weights()[name]
    layer = keras.layers.Dense(weight.shape[1], name=name.replace(".", "_"))
    layer.build((None, weight.shape[0]))
    layer.set_weights([weight, bias])
    return layer


class Subject:
    framework = "keras"
    act = "ReLU"
    weight = "head.kernel"

    def __init__(self):
        self.model = Net()
        self.model(reference.batch())  # Keras notes in a model that it was called and built

    def watch(self, *probes, **options):
        return tt.watch(self.model, *probes, **options)

    def arguments(self, x):
        """What `capture`, `verify` and `compare` are given."""
        return tf.constant(x)

    def array(self, tensor):
        return np.asarray(tensor)

    def call(self, x):
        return self.array(self.model(x))

    def fail(self, x):
        """A call that raises inside the model."""
        self.model.broken = True
        try:
            self.call(x)
        finally:
            self.model.broken = False

    def train(self, x):
        """Forward and backward with the loss sum(output ** 2)."""
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self.model(x)))
        weights = self.model.trainable_weights
        keras.optimizers.SGD(0.0).apply(tape.gradient(loss, weights), weights)

    def parameters(self):
        """All that is learnt, as bytes."""
        return b"".join(weight.numpy().tobytes() for weight in self.model.weights)

    def traces(self):
        """Everything a careless tap could leave behind."""
        layers = [self.model, *self.model._flatten_layers(include_self=False)]
        return {(i, name): value for i, layer in enumerate(layers) for name, value in vars(layer).items()}
