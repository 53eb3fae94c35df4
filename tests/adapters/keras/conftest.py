"""Small Keras models, and what a tap saw of them."""

from __future__ import annotations

import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow says much when it starts

import numpy as np
import pytest

import tensortap as tt

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("these tests are for the TensorFlow backend", allow_module_level=True)


def samples():
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


@pytest.fixture
def data():
    """Forty samples: with a batch of 16 the last one of an epoch is smaller."""
    return samples()


def functional(**options):
    """The same weights every time."""
    keras.utils.set_random_seed(0)
    given = keras.Input((6,))
    h = keras.layers.Dense(8, activation="relu", name="first")(given)
    h = keras.layers.Dense(8, name="second")(h)
    model = keras.Model(given, keras.layers.Dense(1, name="last")(h))
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    return model


@pytest.fixture
def make():
    """A function that makes a compiled functional model."""
    return functional


class Losses:
    """A sink for the loss of every step."""

    def __init__(self):
        self.found = []

    def write(self, step):
        self.found.append(step.metrics["loss"])

    def close(self):
        pass


@pytest.fixture
def losses():
    """A sink for the loss of every step."""
    return Losses()


@pytest.fixture
def memory():
    """A sink."""
    return tt.Memory()


@functools.cache
def batched(size):
    from keras_batches import batches

    return batches(*samples(), size)


def train(model, epochs=1, batch=16, **options):
    return model.fit(batched(batch), epochs=epochs, shuffle=False, verbose=0, **options)


@pytest.fixture
def fit():
    """A function that trains for some epochs of three steps; with batches of 20, of two."""
    return train


@pytest.fixture(scope="session")
def bare_weights():
    """The weights of `make` after training that nobody watches, by number of epochs and size of a batch."""

    @functools.cache
    def trained(epochs, batch=16, **options):
        model = functional(**options)
        train(model, epochs, batch)
        return model.get_weights()

    return trained
