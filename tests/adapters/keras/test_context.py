"""The training context of Keras models: loss, optimizer, data and updates, and what rules conclude from them."""

import keras
import numpy as np
import pytest

import tensortap as tt
from tensortap.integrations.keras import Watch
from tensortap.script.options import RunOptions
from tensortap.script.session import ScriptRun

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Keras sees two of these faults itself


def net(units=1, activation="sigmoid", loss="binary_crossentropy", rate=0.01, built=True):
    """With `built` training is traced once: where Adam makes its variables in a trace, TensorFlow makes another."""
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((4,)), dense(8, "relu", name="a"), dense(units, activation, name="b")])
    optimizer = keras.optimizers.Adam(learning_rate=rate)
    model.compile(optimizer, loss)
    if built:
        optimizer.build(model.trainable_variables)
    return model


def data(rows=96):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return x, (x[:, :1] > 0).astype("float32")


def fitted(path, model, x, y, **options):
    watching = Watch(to=str(path), context=True)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[watching], **options)
    return tt.open_run(path)


def kinds(run):
    return {row["kind"]: row for row in run.events().to_pylist()}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """The run of a correct model."""
    return fitted(tmp_path_factory.mktemp("healthy") / "run", net(built=False), *data())


def test_what_is_recorded(healthy):
    """Model, optimizer, loss, batches, updates and totals are events with the line of `fit`."""
    found = kinds(healthy)
    assert {"model", "optimizer", "loss", "batch", "parameters", "totals"} <= found.keys()
    assert found["optimizer"]["name"] == "Adam"
    assert '"lr": 0.01' in found["optimizer"]["data"]
    assert '"operations": ["Sigmoid", "Addmm"]' in found["loss"]["data"]
    assert '"counts"' in found["loss"]["data"]
    assert "test_context.py" in found["loss"]["code"]


def test_nothing_without_being_asked(tmp_path):
    """`tt.watch` records no context of a Keras model unless it is asked to."""
    model, (x, y) = net(), data(16)
    with tt.watch(model, to=str(tmp_path / "run")):
        model.fit(x, y, verbose=0)
    assert tt.open_run(tmp_path / "run").events().num_rows == 0


@pytest.mark.parametrize(("options", "rule"), [
    ({"activation": "softmax"}, "constant_output"),
    pytest.param({"activation": None}, "activation_loss_mismatch", marks=pytest.mark.thorough),
    ({"activation": "sigmoid", "loss": keras.losses.BinaryCrossentropy(from_logits=True)}, "activation_loss_mismatch"),
    pytest.param({"rate": 1e-9}, "learning_rate_low", marks=pytest.mark.thorough),
])  # fmt: skip
def test_causes(tmp_path, options, rule):
    """The cause is named, at the output layer or the line."""
    found = fitted(tmp_path / "run", net(**options), *data()).findings()
    named = [finding for finding in found if finding.rule == rule]
    assert named, str(found)
    assert named[0].site == "b" or "test_context.py" in named[0].code


def test_a_softmax_that_is_reshaped_is_over_its_classes(tmp_path):
    """A softmax over classes whose output has an axis of length 1 behind it is not one over a single output."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, "softmax"), keras.layers.Reshape((4, 1))])
    model.compile("adam", "binary_crossentropy")
    x, _ = data()
    run = fitted(tmp_path / "run", model, x, np.eye(4, dtype="float32")[x.argmax(1)][..., None])
    assert "constant_output" not in {finding.rule for finding in run.findings()}


def test_healthy(healthy):
    """A correct model raises nothing."""
    assert list(healthy.findings().at_least("warning")) == []


def test_lines_of_a_script(tmp_path):
    """`tensortap run` knows the lines that made the optimizer and compiled the model."""
    script = ScriptRun(RunOptions("train.py", to=str(tmp_path / "run")))
    own = keras.Model.compile, keras.optimizers.Optimizer.__init__
    script.watch_keras()
    model, (x, y) = net(), data(32)
    model.fit(x, y, verbose=0)
    script.finish()
    assert own == (keras.Model.compile, keras.optimizers.Optimizer.__init__)
    found = kinds(tt.open_run(tmp_path / "run"))
    optimizer, loss = (int(found[kind]["code"].rpartition(":")[2]) for kind in ("optimizer", "loss"))
    assert loss == optimizer + 1


def test_validation_and_a_second_optimizer(tmp_path):
    """Data that is held out is described, and an optimizer that takes another's place is told."""
    model, (x, y) = net(3, "softmax", "sparse_categorical_crossentropy"), data(64)
    sorted_labels = np.repeat([0, 1], [48, 16])
    with tt.watch(model, to=str(tmp_path / "run"), context=True):
        model.fit(x, sorted_labels, epochs=1, validation_data=(50 * x, 2 * y[:, 0]), verbose=0)
        model.compile("adam", "sparse_categorical_crossentropy")
        model.fit(x, sorted_labels, epochs=1, verbose=0)
    run = tt.open_run(tmp_path / "run")
    made = [row["data"] for row in run.events().to_pylist() if row["kind"] == "optimizer"]
    assert ['"same_parameters": true' in data for data in made] == [False, True]
    assert "evaluation_inputs_differ" in {finding.rule for finding in run.findings()}
    assert 0 < float(kinds(run)["validation"]["data"].partition('"unseen": ')[2].rstrip("}")) < 1


def test_a_frozen_last_layer_is_told_in_the_words_of_keras(tmp_path):
    """The advice on a frozen layer names `trainable`, which Keras has, not `requires_grad`."""
    layers = [keras.layers.Dense(6, name="hidden"), keras.layers.Dense(2, name="head", trainable=False)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    watching = Watch(to=str(tmp_path / "run"), context=True)
    model.fit(np.ones((8, 4), "float32"), np.arange(8) % 2, batch_size=4, verbose=0, callbacks=[watching])
    (found,) = watching.tap.run.findings("frozen")
    assert found.site == "head" and "head.trainable = True" in found.advice and "requires_grad" not in found.advice
