"""Every kind of model in `fit`: nested, shared, subclassed, with state and random numbers, not built yet, exported."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_batches import batches

import tensortap as tt

layers = keras.layers
X = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
Y = X.sum(1, keepdims=True)
ALL = "**:{output,input,grad_output,grad_input,param,grad}"


class Subclassed(keras.Model):
    """A layer that is used twice, one with state and one with random numbers, and a list of layers."""

    def __init__(self):
        super().__init__()
        self.twice = layers.Dense(6, name="twice")
        self.body = [layers.BatchNormalization(name="norm"), layers.Dropout(0.3, name="drop")]
        self.head = layers.Dense(1, name="head")

    def call(self, x, training=False):
        x = self.twice(keras.ops.tanh(self.twice(x)))
        for layer in self.body:
            x = layer(x, training=training)
        return self.head(x)


def functional():
    """A layer in two places, one of them inside a nested model."""
    given, twice = keras.Input((6,)), layers.Dense(6, name="twice")
    nested = keras.Sequential([keras.Input((6,)), twice, layers.LayerNormalization(name="norm")], name="nested")
    return keras.Model(given, layers.Dense(1, name="head")(twice(nested(twice(given)))))


def attention():
    given = keras.Input((6,))
    h = layers.Reshape((3, 2))(given)
    h = layers.MultiHeadAttention(1, 2, name="attend")(h, h)
    return keras.Model(given, layers.Dense(1, name="head")(layers.Flatten()(h)))


def convolution():
    parts = [layers.Reshape((6, 1)), layers.Conv1D(4, 3, name="conv", activation="gelu"), layers.MaxPooling1D(2)]
    return keras.Sequential(
        [keras.Input((6,)), *parts, layers.Flatten(), layers.Dropout(0.2), layers.Dense(1, name="head")]
    )


MODELS = {"subclassed": Subclassed, "functional": functional, "attention": attention, "convolution": convolution}
# The others have their mechanisms, and each takes seconds.
LONG = ("subclassed", "attention", "convolution")


def made(kind, optimizer="adam", **options):
    keras.utils.set_random_seed(0)
    model = MODELS[kind]()
    model(X)
    model.compile(optimizer, "mse", **options)
    return model


def fit(model):
    model.fit(batches(X, Y, 12), epochs=2, shuffle=False, verbose=0)
    return [weight.numpy() for weight in (*model.weights, *model.optimizer.variables)]


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.thorough) if k in LONG else k for k in MODELS])
def test_training_is_the_same(kind, memory):
    """Weights, moving averages and Adam's moments are the same to rounding after training with everything tapped.

    Adam divides by the size of a gradient, so that rounding of a small one shows in the weight.
    """
    bare, tapped = made(kind), made(kind)
    bare.optimizer.build(bare.trainable_variables)  # else TensorFlow traces it twice, as it does with taps
    bare = fit(bare)
    with tt.watch(tapped, tt.probe(ALL, keep=tt.stats()), to=memory):
        found = fit(tapped)
    for a, b in zip(bare, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
    assert {record.step for record in memory.records} == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", [pytest.param("subclassed", marks=pytest.mark.thorough), "functional"])
def test_each_call_in_a_graph(kind):
    """Calls of a layer that is used more than once are told apart in a graph as they are eagerly, under every name."""
    runs = []
    for eager in (True, False):
        memory, model = tt.Memory(), made(kind, "sgd", run_eagerly=eager)
        with tt.watch(model, "**:{output,grad_output}", to=memory):
            fit(model)
        runs.append({(r.step, str(r.place), r.call): r["l2"] for r in memory.records})
    assert runs[0].keys() == runs[1].keys()
    calls = {call for step, place, call in runs[1] if place == "twice:grad_output"}
    assert calls == ({0, 1} if kind == "subclassed" else {0, 1, 2})
    assert kind == "subclassed" or (0, "nested.twice:output", 2) in runs[1]
    for key, value in runs[0].items():
        assert runs[1][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize(
    "kind", ["LSTM", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("GRU", "SimpleRNN"))]
)
@pytest.mark.filterwarnings("ignore:.*only its last run.*:tensortap.TensortapWarning")
def test_gradients_around_a_loop(kind, memory):
    """Training with gradients tapped goes on where there are loops, and those inside are seen."""

    def train(*probes):
        keras.utils.set_random_seed(0)
        recurrent = [layers.Reshape((3, 2), name="in"), getattr(layers, kind)(4, name="loop")]
        model = keras.Sequential([keras.Input((6,)), *recurrent, layers.Dense(1, name="head")])
        model.compile("sgd", "mse")
        with tt.watch(model, *probes, to=memory) if probes else contextlib.nullcontext():
            return fit(model)

    bare, found = train(), train("**:{output,grad_output,grad_input}")
    assert all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(bare, found, strict=True))
    seen = {record.place.site for record in memory.records if record.place.port == "grad_output"}
    assert {"loop", "loop.cell", "head"} <= seen


def test_gradients_around_a_branch(memory):
    """So it does where layers are called in the branches of a graph, whose outputs are seen."""

    class Branches(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = layers.Dense(6), layers.Dense(6), layers.Dense(1)

        def call(self, x):
            return self.head(tf.cond(tf.reduce_sum(x) < 1e9, lambda: self.a(x), lambda: self.b(x)))

    model = Branches()
    model.a.build((None, 6))
    model.b.build((None, 6))
    model(X)
    model.compile("sgd", "mse")
    with tt.watch(model, "**:{output,grad_output}", to=memory) as tap:
        fit(model)
    found = {str(record.place) for record in memory.records}
    assert found == {"a:output", "head:output", ":output", "head:grad_output", ":grad_output"}
    assert "branch" in tap._adapter.unseen()["a:grad_output"]


def test_half_precision(memory):
    """Mixed precision: activations and their gradients are bfloat16 and float16, as they are computed."""
    parts = [layers.Dense(3, name="b", dtype="mixed_bfloat16"), layers.Dense(1, name="h", dtype="mixed_float16")]
    model = keras.Sequential([keras.Input((6,)), *parts])
    model.compile("sgd", "mse")
    with tt.watch(model, "{b,h}:{output,grad_output}", to=memory):
        model.fit(X, Y, batch_size=24, verbose=0)
    found = {str(record.place): record["dtype"] for record in memory.records}
    assert found == {f"{name}:{port}": kind for name, kind in (("b", "bfloat16"), ("h", "float16"))
                     for port in ("output", "grad_output")}  # fmt: skip


def test_weights_that_are_not_there_yet(memory):
    """Of a layer that is not built they are refused with what to do; among others they are counted as unseen."""
    model = keras.Sequential([layers.Dense(2, name="a")])
    with pytest.raises(tt.TensortapError, match=r"model\.build\(input_shape\)"):
        tt.watch(model, "a.kernel:param", to=memory)
    with tt.watch(model, "**:{output,param}", to=memory) as tap:
        model(X)
    assert {str(record.place) for record in memory.records} == {"a:output", ":output"}
    assert tap.counts["unseen"] == 2 and "before" in tap._adapter.unseen()["a.kernel:param"]
    with tt.watch(model, "a.kernel:param", to=memory) as tap:
        model(X)
    assert tap.counts == {} and str(memory.records[-1].place) == "a.kernel:param"


def test_layers_that_are_made_late(memory):
    """Those that a model makes when it is built are counted as unseen, with what to do."""

    class Late(keras.Model):
        def build(self, shape):
            self.inner = layers.Dense(1)

        def call(self, x):
            return self.inner(x)

    model = Late()
    with tt.watch(model, "**", to=memory) as tap:
        model(X)
    assert list(tap._adapter.unseen()) == ["inner:output"] and tap.counts["unseen"] == 1


def test_exporting_while_watched(memory, tmp_path):
    """What is exported has no taps in it, and the model is watched as before."""
    model = made("functional", "sgd")
    with tt.watch(model, "head", to=memory):
        model.export(tmp_path / "saved", verbose=False)
        assert not memory.records
        output = model.predict(X, verbose=0)
    assert len(memory.records) == 1
    saved = tf.saved_model.load(tmp_path / "saved")
    np.testing.assert_allclose(
        saved.serve(X).numpy(), output, rtol=1e-5, atol=1e-6
    )  # two graphs, each compiled by itself
