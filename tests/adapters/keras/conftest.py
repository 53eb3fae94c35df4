"""Small Keras models, and what a tap saw of them."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow says much when it starts

import numpy as np
import pytest

import tensortap as tt

keras = pytest.importorskip("keras")
pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("these tests are for the TensorFlow backend", allow_module_level=True)


@pytest.fixture
def data():
    """Forty samples: with a batch of 16 the last one of an epoch is smaller."""
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


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


@pytest.fixture
def fit(data):
    """A function that trains for some epochs of three steps; with batches of 20, of two."""

    def run(model, epochs=1, batch=16, **options):
        return model.fit(*data, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **options)

    return run
