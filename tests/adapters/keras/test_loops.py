"""Loops inside graphs: the cells of recurrent layers, and loops of the user's own."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_batches import batches
from rounding import assert_same_to_rounding

import tensortap as tt
from tensortap.adapters.arrays import MOST_LOOPS

graph_or_xla = pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
# XLA takes seconds to compile what another test compiles too.
compiled_once = pytest.mark.parametrize(
    "jit", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["graph", "xla"]
)


def batch(length):
    return np.random.default_rng(0).normal(size=(2, length, 4)).astype(np.float32)


def recurrent(lstm=True, **options):
    """An LSTM, and a cell in a loop, each of which Keras calls once before its loop."""
    keras.utils.set_random_seed(0)
    first = [keras.layers.LSTM(3, name="lstm", return_sequences=True)] if lstm else []
    model = keras.Sequential(
        [keras.Input((None, 4)), *first, keras.layers.RNN(keras.layers.SimpleRNNCell(2), name="rnn")]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    return model


def thrice(layer, **options):
    """A function with a layer in a loop, and the gradients of its weights."""

    @tf.function(**options)
    def run(x):
        with tf.GradientTape() as tape:
            for _ in tf.range(3):
                x = layer(x)
            loss = tf.reduce_sum(x)
        return tape.gradient(loss, layer.trainable_weights)

    return run


def calls(memory):
    """For every step and place the calls, in order, and something to know each by."""
    found = {}
    for record in sorted(memory.records, key=lambda record: (record.step, record.seq)):
        found.setdefault((record.step, str(record.place)), []).append((record.call, record["mean"], record["max"]))
    return found


def train(model):
    model.fit(batches(batch(5), np.ones((2, 2)), 2), epochs=2, shuffle=False, verbose=0)


def fitted(memory, *probes, **options):
    model = recurrent(**options)
    with tt.watch(model, *probes, to=memory) as tap:
        train(model)
    return model, tap


@compiled_once
def test_a_graph_gives_the_calls_of_an_eager_run(memory, jit):
    """Each pass of a cell is a call with the number it has eagerly, forward and backward; weights agree to rounding."""
    sites = "*.cell:{output,grad_output}" if jit else "**:{output,input,grad_output,grad_input,grad}"
    eager, probe = tt.Memory(), tt.probe(sites, keep=tt.stats())  # compiling takes long
    fitted(eager, probe, run_eagerly=True)
    model, _ = fitted(memory, probe, jit_compile=jit)
    bare = recurrent(jit_compile=jit)
    train(bare)
    assert_same_to_rounding(bare.get_weights(), model.get_weights())
    expected, found = calls(eager), calls(memory)
    assert found.keys() == expected.keys()
    # Eagerly the state after the last pass, and that before the first, have no gradients; in a loop they have.
    state = {"rnn.cell:grad_input.states[0]", "lstm.cell:grad_output[1][1]"}
    state |= {"lstm.cell:grad_input.states[0]", "lstm.cell:grad_input.states[1]"}
    for key in expected:
        if key[1] in state:
            assert (len(expected[key]), len(found[key])) == (4, 5)
        else:
            assert np.allclose(expected[key], found[key], rtol=1e-4, atol=1e-5), key
    assert [call for call, _, _ in found[0, "rnn.cell:output[0]"]] == [0, 1, 2, 3, 4, 5]
    assert [call for call, _, _ in found[0, "lstm.cell:grad_output[1][0]"]] == [0, 1, 2, 3, 4]


def test_elements(memory):
    """Whole tensors are kept, the same as eagerly, and in order."""
    model, eager = recurrent(), tt.Memory()
    probe = tt.probe("rnn.cell:output[0]", keep=tt.full())
    with tt.watch(model, probe, to=eager):
        model(batch(40))
    with tt.watch(model, probe, to=memory) as tap:
        model.predict(batch(40), verbose=0)
        (loop,) = [
            held for function in tap._adapter._taps.backend.observer.graphs._functions for held in function.held[1:]
        ]
    assert len(memory.tensors) == 41 and not tap.counts
    for one, other in zip(eager.tensors, memory.tensors, strict=True):
        assert np.allclose(one.array, other.array, atol=1e-6)
    assert int(tf.raw_ops.TensorListLength(input_handle=loop._store._list.variable.read_value())) == 0


@compiled_once
def test_a_long_loop(memory, jit):
    """Of more passes the first are seen, and the others counted, in every step."""
    model = recurrent(lstm=False, jit_compile=jit)
    with tt.watch(model, tt.probe("rnn.cell:output[0]", keep=tt.stats()), to=memory) as tap:
        for _ in range(2):
            model.predict(batch(MOST_LOOPS + 6), verbose=0)
    assert [r.call for r in memory.records if r.step == 1] == list(range(1 + MOST_LOOPS))
    assert tap.counts == {"unseen_iterations": 12}


def test_a_recurrent_layer_used_twice(memory):
    """Calls of the second use follow those of the first, as they do eagerly."""
    keras.utils.set_random_seed(0)
    layer, given = (
        keras.layers.RNN(keras.layers.SimpleRNNCell(4), return_sequences=True, name="rnn"),
        keras.Input((3, 4)),
    )
    model, eager = keras.Model(given, layer(layer(given))), tt.Memory()
    with tt.watch(model, "rnn.cell:output[0]", to=eager):
        model(batch(3))
    with tt.watch(model, "rnn.cell:output[0]", to=memory):
        model.predict(batch(3), verbose=0)
    (expected,), (found,) = calls(eager).values(), calls(memory).values()
    assert len(found) == 8 and np.allclose(expected, found, atol=1e-6)


def test_a_step_that_the_loss_decides(memory):
    """Passes of a step that was not wanted do not turn up in the next one."""
    model = recurrent(lstm=False)
    limit = tt.probe("rnn.cell:output[0]", when=tt.metric("loss") > 2.0)
    with tt.watch(model, limit, to=memory):
        for target in (1.0, 9.0, 1.0, 9.0):
            model.fit(batches(batch(3), np.full((2, 2), target), 2), shuffle=False, verbose=0)
    assert {step: [call for call, _, _ in found] for (step, _), found in calls(memory).items()} == {
        1: [0, 1, 2, 3],
        3: [0, 1, 2, 3],
    }


@graph_or_xla
def test_a_loop_of_ones_own(memory, jit):
    """A layer called in the loop of a function that never calls the model: outputs and gradients, pass by pass."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, "tanh", name="dense")])
    run = thrice(model.layers[0], jit_compile=jit)
    expected = [gradient.numpy() for gradient in run(batch(3)[0])]
    with tt.watch(model, tt.probe("dense:{output,grad_output}", keep=tt.stats()), to=memory) as tap:
        for _ in range(2):
            found = run(batch(3)[0])
            tap.step()
    assert_same_to_rounding(expected, found)
    seen = calls(memory)
    assert {key: [call for call, _, _ in each] for key, each in seen.items()} == {
        (step, place): [0, 1, 2] for step in (0, 1) for place in ("dense:output", "dense:grad_output")
    }
    assert seen[0, "dense:grad_output"][0][1:] == (1.0, 1.0)


def test_loops_in_loops_and_functions_in_them(memory):
    """Every pass counts, however it is reached."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="dense")])
    inner = tf.function(lambda x: model.layers[0](x))

    @tf.function
    def run(x):
        for _ in tf.range(2):
            for i in tf.range(3):
                x = inner(x) if i != 1 else model.layers[0](x)
        return x

    with tt.watch(model, "dense", to=memory):
        found = run(batch(3)[0]).numpy()
    assert len(memory.records) == 6
    assert_same_to_rounding(run(batch(3)[0]), found)


@pytest.mark.filterwarnings("ignore:a traced function ran more than once")
def test_the_model_in_a_loop(memory):
    """A loop around the model itself is differentiated as ever; its outputs are those of the last pass."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="dense")])
    run = thrice(model)
    expected = run(batch(3)[0])
    with tt.watch(model, "dense:{output,grad_output}", to=memory) as tap:
        found = run(batch(3)[0])
    assert_same_to_rounding(expected, found)
    assert {place: len(each) for (_, place), each in calls(memory).items()} == {
        "dense:output": 1,
        "dense:grad_output": 3,
    }
    assert tap.counts["overwritten_runs"] == 2


def test_operations_in_a_loop(memory):
    """Single operations of a cell are seen in every pass."""
    model = recurrent(lstm=False)
    with tt.watch(model, "rnn.cell/MatMul#0", to=memory):
        model.predict(batch(3), verbose=0)
    (found,) = calls(memory).values()
    assert [call for call, _, _ in found] == [0, 1, 2, 3]
