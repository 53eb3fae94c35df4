"""Naming and seeing layers of every kind of model."""

from __future__ import annotations

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tensortap as tt

X = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)


def paths(model):
    return [site.path for site in tt.sites(model) if "output" in site.ports]


def places(memory):
    return [str(record.place) for record in sorted(memory.records, key=lambda record: (record.step, record.seq))]


def test_names_in_functional_models():
    """Layers go by their names, nested models by both, and operations that are no layers are sites too."""
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="small")], name="inner")
    given = keras.Input((4,))
    model = keras.Model(given, keras.ops.tanh(inner(given)))
    names = paths(model)
    assert names[:3] == ["", "inner", "inner.small"] and names[3].startswith("tanh")
    assert {"inner.small.kernel", "inner.small.bias"} <= {site.path for site in tt.sites(model)}


def test_names_in_layers_of_ones_own():
    """Elsewhere they go by attribute, list and dict; one that is held nowhere by its name."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.stages = {"one": keras.layers.Dense(2), "many": [keras.layers.ReLU()]}
            self.attend = keras.layers.MultiHeadAttention(1, 2)

    model = Net()
    assert paths(model) == ["", "stages.one", "stages.many.0", "attend"]
    model.attend.build((2, 5, 4), (2, 5, 4))
    assert "attend._query_dense" in paths(model)


def test_layers_within_layers(memory):
    """A wrapper calls its layer directly: it is seen, eagerly and in a graph."""
    model = keras.Sequential(
        [
            keras.Input((5, 4)),
            keras.layers.TimeDistributed(keras.layers.Dense(3), name="each"),
            keras.layers.LSTM(2, name="lstm"),
        ]
    )
    with tt.watch(model, "each.layer", "lstm", to=memory):
        model(X)
        model.predict(X, verbose=0)
    seen = {(record.step, str(record.place)) for record in memory.records}
    assert seen == {(step, place) for step in (0, 1) for place in ("each.layer:output", "lstm:output")}


def test_masks_go_on(memory):
    """A mask that a layer hangs on its output is there also when gradients are seen."""
    model = keras.Sequential(
        [keras.layers.Embedding(9, 4, mask_zero=True, name="words"), keras.layers.GlobalAveragePooling1D(name="mean")]
    )
    ids = np.array([[1, 2, 0], [3, 0, 0]])
    bare = model(ids).numpy()
    with tt.watch(model, "words:{output,grad_output,grad_input}", "mean:{grad_input,grad_output}", to=memory):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids))
        tape.gradient(loss, model.trainable_weights)
    assert np.array_equal(bare, model(ids).numpy())
    assert places(memory) == ["words:output", "mean:grad_output", "mean:grad_input.inputs", "words:grad_output"]


def test_gradients_are_the_tapes_own(memory):
    """The gradient that is recorded is the one a tape gives, and it is not changed."""
    model = keras.Sequential([keras.layers.Dense(3, "tanh", name="a"), keras.layers.Dense(1, name="b")])
    x = tf.constant(X[:, 0])
    hidden = model.layers[0](x)
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        loss = tf.reduce_sum(model.layers[1](hidden) ** 2)
    expected = tape.gradient(loss, hidden).numpy()
    with tt.watch(model, tt.probe("a:grad_output", "b:grad_input", keep=tt.full()), to=memory):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x) ** 2)
        tape.gradient(loss, model.trainable_weights)
    assert places(memory) == ["b:grad_input", "a:grad_output"]
    assert all(np.array_equal(tensor.array, expected) for tensor in memory.tensors)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own, when it saves
def test_copies_carry_no_tap(make, memory, tmp_path):
    """Saved, cloned and copied models are not watched."""
    model = make()
    with tt.watch(model, "**", to=memory):
        model.save(tmp_path / "model.keras")
        others = [
            keras.models.load_model(tmp_path / "model.keras"),
            keras.models.clone_model(model),
            copy.deepcopy(model),
        ]
        for other in others:
            other(X[:, 0, :1] * np.ones((1, 6), np.float32))
    assert not memory.records


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own, when it quantises
def test_a_quantised_layer(memory):
    """A layer that Keras has quantised is seen through its other method."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="dense")])
    model.layers[-1].quantize("int8")
    with tt.watch(model, "dense", to=memory):
        output = model(X[:, 0]).numpy()
    (record,) = memory.records
    assert record["max"] == output.max()


def test_dropout_draws_the_same(make, memory):
    """Random numbers are those of an unwatched run."""
    outputs = []
    for watched in (False, True):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Dropout(0.5, name="drop")])
        if watched:
            with tt.watch(model, "**:{output,grad_output}", to=memory):
                outputs.append(model(X, training=True).numpy())
        else:
            outputs.append(model(X, training=True).numpy())
    assert np.array_equal(*outputs)


def test_what_is_not_there(make, memory):
    """`:update` is refused with what to do instead, and a weight of a layer that is not built is named as missing."""
    with pytest.raises(tt.TensortapError, match="take differences"):
        tt.watch(make(), "**:update", to=memory)
    with pytest.raises(tt.TensortapError):
        tt.watch(keras.Sequential([keras.layers.Dense(2, name="a")]), "a.kernel:param", to=memory)


def test_an_activation_inside_a_layer_can_be_saturated(tmp_path):
    """A layer says which function it applies to its output, so that rules on activations know it."""
    layers = [keras.layers.Dense(8, "sigmoid", name="hidden"), keras.layers.Activation("tanh", name="act")]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1, name="out")])
    with tt.watch(model, to=tmp_path / "run") as tap:
        for _ in range(4):
            model(X[:, 0] * 1e4)
            tap.step()
    assert {m["path"]: m.get("activation") for m in tap.run.info["model"]["modules"]} == {
        "": None, "hidden": "sigmoid", "act": "tanh", "out": None,
    }  # fmt: skip
    assert "hidden:output" in {finding.site for finding in tap.run.findings("saturated")}
