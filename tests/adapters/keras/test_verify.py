"""`tt.verify` of a compiled model compares a training step, and leaves model and optimizer as they were."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tensortap as tt

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(16, 4)) * 30).astype("float32")
Y = (RNG.random((16, 1)) > 0.5).astype("float32")


def compiled(loss="binary_crossentropy", units=1, activation="sigmoid", kind=keras.Model, metrics=("mae",)):
    keras.utils.set_random_seed(0)
    given = keras.Input((4,))
    hidden = keras.layers.Dense(8, "relu", name="hidden")(given)
    model = kind(given, keras.layers.Dense(units, activation, name="out")(hidden))
    model.compile("adam", loss, metrics=list(metrics))
    return model


def state(model):
    return [variable.numpy().tolist() for variable in (*model.variables, *model.optimizer.variables)]


WEIGHTED = (X, Y, np.ones(16, "float32"))


@pytest.mark.parametrize(
    ("batch", "pattern"),
    [
        ((X, Y), "**"),
        (WEIGHTED, "out:grad_output"),
        pytest.param((X, Y), "out:grad_output", marks=pytest.mark.thorough),
        pytest.param(WEIGHTED, "**", marks=pytest.mark.thorough),
        pytest.param(X, "out:grad_output", marks=pytest.mark.thorough),
        pytest.param(X, "**", marks=pytest.mark.thorough),
    ],
)
def test_a_training_step_is_the_same(batch, pattern):
    """With targets or without, training a sigmoid by its logits is untouched, and so is everything it changes."""
    model = compiled()
    before = state(model)
    found = tt.verify(model, batch, pattern, repeats=1)
    assert found and found.deterministic, str(found)
    assert state(model)[: len(before)] == before
    assert model.optimizer.iterations.numpy() == 0


def test_classes_are_made_up_where_the_loss_wants_them():
    """A loss of class numbers gets class numbers for targets."""
    assert tt.verify(compiled("sparse_categorical_crossentropy", 3, "softmax", metrics=()), X, repeats=1)


class Suspicious(keras.Model):
    """Trains otherwise when somebody has wrapped its training step, and calls the same."""

    def train_step(self, data):
        found = super().train_step(data)
        if "train_step" in vars(self):
            kernel = self.get_layer("hidden").kernel
            kernel.assign(kernel + 0.25)
        return found


def test_training_that_changes_is_found():
    """A model whose outputs are the same but whose weights train otherwise does not pass, and they are named."""
    found = tt.verify(compiled(kind=Suspicious), (X, Y), repeats=1)
    assert not found and not found.same_outputs
    assert any("hidden/kernel" in line and "0.25" in line for line in found.differences), found.differences


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)


def test_a_model_that_is_not_built_is_built_and_not_trained():
    """The first call makes the variables; afterwards they have the values that they began with."""
    model = Subclassed()
    model.compile("sgd", "mse")
    assert tt.verify(model, (X, Y), repeats=1)
    assert model.optimizer.iterations.numpy() == 0 and not model.out.bias.numpy().any()


def test_a_batch_is_not_changed():
    """A layer that works in place on NumPy arrays sees a copy."""
    x = X.copy()
    tt.verify(compiled(), (x, Y), repeats=1)
    assert np.array_equal(x, X)
