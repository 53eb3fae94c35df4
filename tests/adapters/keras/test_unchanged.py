"""Training with taps is training without them, also where Keras asks a tensor what made it or what hangs on it."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_batches import batches
from rounding import assert_same_to_rounding

import tensortap as tt

EVERYTHING = "**:{output,input,grad_output,grad_input}"
WAYS = {"eager": {"run_eagerly": True}, "graph": {"jit_compile": False}, "xla": {"jit_compile": True}}
COMPILED_ONCE = [
    "graph",
    *(pytest.param(way, marks=pytest.mark.thorough) for way in ("eager", "xla")),
]  # seconds each; another test has it
LOSSES = {
    "binary_crossentropy": 1,
    "binary_focal_crossentropy": 1,
    "mse": 1,
    "hinge": 1,
    "categorical_crossentropy": 3,
    "sparse_categorical_crossentropy": 3,
    "kl_divergence": 3,
}
ACTIVATIONS = ("sigmoid", "softmax", "tanh", None)
# Pairs in which Keras goes from the activation's output back to its logits.
LOGITS = {("binary_crossentropy", "sigmoid"), ("binary_focal_crossentropy", "sigmoid"),
          ("categorical_crossentropy", "softmax"), ("sparse_categorical_crossentropy", "softmax")}  # fmt: skip
X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32) * 30


class Raw(keras.layers.Layer):
    """TensorFlow's own activation, which Keras knows only by the type of the operation."""

    def __init__(self, name, kind):
        super().__init__(name=name)
        self.kind = kind

    def call(self, x):
        return getattr(tf.nn, self.kind)(x)


def targets(loss):
    chosen = np.random.default_rng(1).integers(0, max(2, LOSSES[loss]), len(X))
    if loss in ("categorical_crossentropy", "kl_divergence"):
        return np.eye(3, dtype=np.float32)[chosen]
    return chosen if loss.startswith("sparse") else chosen[:, None].astype(np.float32)


def fitted(last, loss, way, probe=None):
    """Weights and losses after some steps, with or without taps; and what was recorded."""
    keras.utils.set_random_seed(0)
    given = keras.Input((4,))
    model = keras.Model(given, last(keras.layers.Dense(5, "tanh", name="hidden")(given), LOSSES[loss]))
    model.compile(keras.optimizers.SGD(0.1), loss, **WAYS[way])
    memory = tt.Memory()
    steps = batches(X, targets(loss), 8)  # three
    if probe is None:
        history = model.fit(steps, shuffle=False, verbose=0)
    else:
        with tt.watch(model, probe, to=memory) as tap:
            history = model.fit(steps, shuffle=False, verbose=0)
            memory.unseen = tap._adapter.unseen()
    return [*model.get_weights(), np.array(history.history["loss"])], memory


def check(last, loss, way, probe=EVERYTHING):
    bare, (found, memory) = fitted(last, loss, way)[0], fitted(last, loss, way, probe)
    if way == "eager":
        assert all(map(np.array_equal, bare, found))
    else:
        assert_same_to_rounding(bare, found)
    return memory


@functools.cache
def check_pair(loss, activation, way):
    return check(lambda x, n: keras.layers.Dense(n, activation, name="out")(x), loss, way)


def pairs():
    """Every loss with every activation in both ways; what only repeats the mechanism is for `make thorough`."""
    for i, loss in enumerate(LOSSES):
        for j, activation in enumerate(ACTIVATIONS):
            for way in ("eager", "graph"):
                often = (i + j) % 12 == (0 if way == "eager" else 1) or (
                    way == "graph" and (loss, activation) in LOGITS
                )
                yield pytest.param(loss, activation, way, marks=() if often else pytest.mark.thorough)


@pytest.mark.filterwarnings("ignore:You are using a softmax:UserWarning")  # of one unit
@pytest.mark.parametrize(("loss", "activation", "way"), list(pairs()))
def test_losses_and_activations(loss, activation, way):
    """Weights and losses of every pair are the same, bit for bit where nothing is compiled."""
    check_pair(loss, activation, way)


@pytest.mark.parametrize("way", COMPILED_ONCE)
@pytest.mark.parametrize(
    ("kind", "loss"), [("sigmoid", "binary_crossentropy"), ("softmax", "categorical_crossentropy")]
)
def test_an_activation_that_keras_knows_by_its_operation(kind, loss, way):
    """In a graph Keras takes the logits of `tf.nn.sigmoid` by the type of the operation: it still finds it."""
    check(lambda x, n: Raw("out", kind)(keras.layers.Dense(n, name="logits")(x)), loss, way)


@pytest.mark.parametrize("way", COMPILED_ONCE)
def test_a_loss_that_another_operation_would_mislead(way):
    """A sigmoid under a loss that looks for a softmax: the output itself counts, and its gradient is seen."""
    memory = check(lambda x, n: Raw("out", "sigmoid")(keras.layers.Dense(n)(x)), "categorical_crossentropy", way)
    assert "out:grad_output" in {str(record.place) for record in memory.records}


@pytest.mark.parametrize("way", COMPILED_ONCE)
def test_logits_are_said_to_be_taken(way):
    """Where the loss goes past the output there is no gradient of it, which is said; that of the logits is seen."""
    memory = check_pair("binary_crossentropy", "sigmoid", way)
    assert "from the logits" in memory.unseen["out:grad_output"]
    split = check(
        lambda x, n: keras.layers.Activation("sigmoid", name="out")(keras.layers.Dense(n, name="logits")(x)),
        "binary_crossentropy",
        way,
    )
    assert "logits:grad_output" in {str(record.place) for record in split.records}


def test_a_function_differentiated_as_a_whole():
    """A tape around a `tf.function`, whose graph TensorFlow differentiates by itself."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="in"), Raw("out", "softmax")])
    run, y = tf.function(model), np.eye(3, dtype=np.float32)[[0, 1, 2] * 8]
    memory = tt.Memory()

    def gradients():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(run(X) - y))
        return tape.gradient(loss, model.trainable_weights)

    bare = gradients()
    with tt.watch(model, "**:grad_output", to=memory) as tap:
        found = gradients()
        tap.step()
    assert_same_to_rounding(bare, found)
    assert [str(record.place) for record in memory.records] == [":grad_output", "out:grad_output", "in:grad_output"]


def attending(way):
    """A layer that takes the masks off its inputs, and layers after it that ask for them."""
    keras.utils.set_random_seed(0)
    ids = keras.Input((6,), dtype="int32")
    words = keras.layers.Embedding(9, 4, mask_zero=True, name="words")(ids)
    attended = keras.layers.MultiHeadAttention(2, 2, name="attend")(words, words)
    both = keras.layers.Add(name="both")([words, attended])
    mean = keras.layers.GlobalAveragePooling1D(name="mean")(both)
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(mean))
    model.compile(keras.optimizers.SGD(0.1), "mse", **WAYS[way])
    return model


@pytest.mark.parametrize("way", [pytest.param("eager", marks=pytest.mark.thorough), "graph"])
def test_masks(way):
    """Masks that layers hang on tensors, and take off them, are the same ones with taps.

    A gradient that is the sum of several is summed in another order where one of the inputs is watched.
    """
    ids = np.random.default_rng(2).integers(0, 9, (12, 6))
    bare, tapped, steps = attending(way), attending(way), batches(ids, np.ones(12), 4)
    bare.fit(steps, shuffle=False, verbose=0)
    with tt.watch(tapped, EVERYTHING, to=tt.Memory()):
        tapped.fit(steps, shuffle=False, verbose=0)
    assert_same_to_rounding(bare.get_weights(), tapped.get_weights())


class Attentive(keras.Model):
    """Uses its input again after a layer has taken the mask off it."""

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(9, 4, mask_zero=True)
        self.attend = keras.layers.MultiHeadAttention(2, 2)
        self.pool = keras.layers.GlobalAveragePooling1D()

    def call(self, ids):
        words = self.words(ids)
        return self.pool(words) + self.pool(self.attend(words, words)) + self.pool(words)


def test_a_mask_that_a_layer_takes_off():
    """What a layer does to the mask of the tensor it is given shows on that tensor, not on a copy of it."""
    keras.utils.set_random_seed(0)
    model, ids = Attentive(), np.random.default_rng(2).integers(0, 9, (12, 6))
    bare = model(ids).numpy()
    with tt.watch(model, EVERYTHING, to=tt.Memory()), tf.GradientTape() as tape:
        found = model(ids)
    assert np.array_equal(bare, found.numpy())
    assert tape.gradient(found, model.words.trainable_weights[0]) is not None


def compiled(activation, loss, units):
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(5, "tanh", name="hidden")
    model = keras.Sequential([keras.Input((4,)), hidden, keras.layers.Dense(units, activation, name="out")])
    model.compile("adam", loss)
    model.optimizer.build(model.trainable_variables)  # or each training step is traced twice; test_verify.py has that
    return model


@pytest.mark.parametrize(
    ("activation", "loss", "units"),
    [
        ("sigmoid", "binary_crossentropy", 1),
        pytest.param("softmax", "sparse_categorical_crossentropy", 3, marks=pytest.mark.thorough),
        pytest.param(None, "mse", 2, marks=pytest.mark.thorough),
    ],
)
def test_verify_compares_a_training_step(activation, loss, units):
    """A step with the gradient of the output watched passes, with targets or without; the model is as it was."""
    model = compiled(activation, loss, units)
    before = model.get_weights()
    y = np.zeros((len(X), units if loss == "mse" else 1), np.float32)
    for batch in (X, (X, y)):
        assert tt.verify(model, batch, "**:{output,grad_output}", repeats=1)
    assert all(map(np.array_equal, before, model.get_weights()))


def test_verify_would_notice(monkeypatch):
    """A tap that loses the logits of an output is found by the weights after a step; outputs are the same."""
    monkeypatch.setattr("tensortap.adapters.keras.hooks.copy_attributes", lambda source, target: None)
    found = tt.verify(compiled("sigmoid", "binary_crossentropy", 1), X, "out:grad_output", repeats=1)
    assert not found
