"""Keras's own training, evaluation and prediction, in graphs and under XLA."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from rounding import assert_same_to_rounding

import tensortap as tt

COMPARED = ("numel", "nan", "posinf", "zeros", "min", "max")
MOMENTS = ("mean", "std", "l1", "l2")
ALL = "**:{output,input,grad_output,grad_input,param,grad}"
# XLA takes seconds to compile what another test compiles too.
compiled_once = pytest.mark.parametrize(
    "jit", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["graph", "xla"]
)


def weights(model):
    return [weight.numpy() for weight in model.weights]


def places(memory):
    return sorted({str(record.place) for record in memory.records})


def steps(memory):
    return sorted({record.step for record in memory.records})


def by_place(memory):
    found = {}
    for record in sorted(memory.records, key=lambda record: (record.step, record.seq)):
        found.setdefault((record.step, str(record.place)), []).append(record)
    return found


@compiled_once
def test_weights_after_training_are_the_same(make, fit, bare_weights, memory, jit):
    """With every layer, gradient and weight tapped, training ends with the same weights, to rounding."""
    tapped = make(jit_compile=jit)
    with tt.watch(tapped, tt.probe(ALL, keep=tt.stats()), to=memory):
        fit(tapped, epochs=3, batch=20)
    assert_same_to_rounding(bare_weights(epochs=3, batch=20, jit_compile=jit), weights(tapped))
    assert steps(memory) == [0, 1, 2, 3, 4, 5]
    assert {record["phase"] for record in memory.records} == {"train"}


@compiled_once
def test_a_graph_gives_the_rows_of_an_eager_run(make, fit, jit):
    """Counts, ends and histograms are equal; moments agree to rounding; the smaller last batch has its own shape."""
    eager, graph = tt.Memory(), tt.Memory()
    keep, sites = ([tt.stats()], "{first,second}") if jit else (None, "**")  # compiling takes long, histograms more
    for options, memory in (({"run_eagerly": True}, eager), ({"jit_compile": jit}, graph)):
        model = make(**options)
        with tt.watch(model, tt.probe(ALL.replace("**", sites), keep=keep), to=memory):
            fit(model)
    expected, found = by_place(eager), by_place(graph)
    assert found.keys() == expected.keys()
    assert any(place == "second:grad_output" for _, place in found)
    for key, records in expected.items():
        for one, other in zip(records, found[key], strict=True):
            assert (one["shape"], one["dtype"], one.call) == (other["shape"], other["dtype"], other.call), key
            assert [one[c] for c in COMPARED] == pytest.approx([other[c] for c in COMPARED], rel=1e-5, abs=1e-6), key
            assert [one[c] for c in MOMENTS] == pytest.approx([other[c] for c in MOMENTS], rel=1e-4, abs=1e-5), key
            assert jit or one["hist_counts"].sum() == other["hist_counts"].sum(), key
    assert {record["shape"] for (_, place), (record,) in found.items() if place == "first:output"} == {(16, 8), (8, 8)}


def test_the_row_in_a_graph_is_the_kernels(memory):
    """What a graph hands over is reduced by the same kernel, to the last bit."""
    model = keras.Sequential([keras.layers.Identity(name="same")])
    x = np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32)
    x[0, :3] = [np.nan, np.inf, 0.0]
    with tt.watch(model, tt.probe("same", keep=[tt.stats(), tt.histogram(), tt.full()]), to=memory):
        model.predict(x, verbose=0)
    (record,) = memory.records
    summary = tt.summarize(x)
    assert {c: record[c] for c in (*COMPARED, *MOMENTS)} == {c: summary[c] for c in (*COMPARED, *MOMENTS)}
    assert np.array_equal(memory.tensors[0].array, x, equal_nan=True)


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("bfloat16", "float64", "float16", "int32", "uint8", "bool")
        ),
    ],
)
def test_the_row_under_xla_is_the_kernels_to_rounding(dtype):
    """For every type: counts, ends, histogram and hash are equal, moments to rounding."""
    from tensortap.adapters.arrays import ArrayObserver
    from tensortap.adapters.keras.graphs.taps import GraphTaps
    from tensortap.record.recorder import Recorder
    from tensortap.types import Place

    values = np.random.default_rng(2).normal(0, 40, size=(3, 50))
    values[0, :5] = [0, 0, np.nan, np.inf, -np.inf] if "float" in dtype else 0
    given = tf.cast(tf.constant(np.abs(values) if dtype in ("uint8", "bool") else values), dtype)
    recorder = Recorder([tt.probe("x", keep=[tt.histogram(), tt.hash()])])
    graphs = GraphTaps(ArrayObserver(recorder), [])

    @tf.function(jit_compile=True)
    def run(x):
        with graphs.function():
            graphs.keep(recorder.point(Place("x"), 1), x)
        return tf.shape(x)

    run(given)
    graphs.collect(recorder.current)
    (step,) = recorder.close()
    summary, table = tt.summarize(given.numpy(), hash=True), step.table
    for column in (*COMPARED, "neginf", "hash"):
        assert table.column(column)[0] == summary[column], column
    for column in MOMENTS:
        close = 1e-6 * summary["l1"] / summary["numel"]  # the kernel adds in float32 by eights
        assert table.column(column)[0] == pytest.approx(summary[column], rel=1e-6, abs=close), column
    offset, counts = table.histogram(0)
    assert offset == summary["hist_offset"] and np.array_equal(counts, summary["hist_counts"])
    assert table.shape(0) == (3, 50)


def test_evaluate_and_predict(make, data, memory):
    """Their steps are told apart by their phase."""
    model = make()
    with tt.watch(model, "last", to=memory):
        model.evaluate(*data, batch_size=20, verbose=0)
        model.predict(data[0], batch_size=20, verbose=0)
    phases = {record.step: record["phase"] for record in memory.records}
    assert phases == {0: "eval", 1: "eval", 2: "predict", 3: "predict"}


def test_what_predict_gives_is_what_is_recorded(make, data, memory):
    """The whole tensor can be kept in a graph, and so can samples, rows, and what a function gives."""
    model = make()
    keep = [tt.full(), tt.sample(3), tt.rows([1]), lambda x: float(x.max())]
    with tt.watch(model, tt.probe("last", keep=keep), to=memory):
        output = model.predict(data[0], batch_size=40, verbose=0)
    kept = {tensor.kind: tensor.array for tensor in memory.tensors}
    assert np.array_equal(kept["full"], output) and np.array_equal(kept["rows"], output[1:2])
    assert np.isin(kept["sample"], output).all()
    assert list(memory.records[0].numbers.values()) == [float(output.max())]


def test_elements_under_xla_are_counted_as_skipped(make, fit, memory):
    """They are not there, which is said once; the statistics are."""
    model = make(jit_compile=True)
    kept = tt.probe("last", keep=[tt.stats(), tt.full()])
    with pytest.warns(tt.TensortapWarning, match="jit_compile"), tt.watch(model, kept, to=memory) as tap:
        fit(model, batch=20)
    assert tap.counts["skipped_elements"] and steps(memory) == [0, 1] and not memory.tensors


@compiled_once
def test_every(make, fit, memory, jit):
    """Only the wanted steps are recorded, and no trigger retraces."""
    model = make(jit_compile=jit)
    with tt.watch(model, tt.probe("last", when=tt.every(4)), to=memory):
        fit(model, epochs=5, batch=20)
    assert steps(memory) == [0, 4, 8]


@compiled_once
def test_a_metric_decided_in_the_graph(make, fit, memory, losses, jit):
    """The steps with a high loss are the ones kept; the others write nothing at all."""
    everything = make(jit_compile=jit)
    with tt.watch(everything, "last", to=losses):
        fit(everything, epochs=3, batch=20)
    limit = sorted(losses.found)[3]
    model = make(jit_compile=jit)
    with tt.watch(model, tt.probe("last", when=tt.metric("loss") > limit), to=memory) as tap:
        fit(model, epochs=3, batch=20)
        wrote = sum(int(function._runs.numpy()) for function in tap._adapter._taps.backend.observer.graphs._functions)
    assert steps(memory) == [i for i, loss in enumerate(losses.found) if loss > limit]
    assert wrote == len(steps(memory)) == 2


def test_the_loss_is_the_steps_own(make, data, losses):
    """Not the running mean that Keras prints."""
    model, (x, y) = make(), data
    with tt.watch(model, "last", to=losses):
        model.evaluate(x, y, batch_size=20, verbose=0)
    expected = [float(np.mean((model(x[i : i + 20]).numpy() - y[i : i + 20]) ** 2)) for i in (0, 20)]
    assert losses.found == pytest.approx(expected, rel=1e-5)


@pytest.mark.thorough  # the contract has look-back
def test_lookback(make, fit, memory, losses):
    """With look-back the steps before the one with the high loss are kept too."""
    first, model = make(), make()
    with tt.watch(first, "last", to=losses):
        fit(first, epochs=2)
    when = tt.metric("loss") < min(losses.found) * 1.0001
    with tt.watch(model, tt.probe("last", when=when), to=memory, lookback=1):
        fit(model, epochs=2)
    best = losses.found.index(min(losses.found))
    assert steps(memory) == [best - 1, best]


def test_old_traces_are_given_back(make, fit, memory):
    """After closing, the model has the function it had, with its traces, and nothing of ours."""
    model = make()
    fit(model)
    model.predict(np.zeros((2, 6), np.float32), verbose=0)
    before = {name: value for name, value in vars(model).items() if name.endswith("_function")}
    with tt.watch(model, "last", to=memory):
        fit(model)
        assert model.train_function is not before["train_function"]
    assert {name: value for name, value in vars(model).items() if name.endswith("_function")} == before
    seen = len(memory.records)
    fit(model)
    assert len(memory.records) == seen == 3
    assert not [name for name in vars(model) if type(vars(model)[name]).__module__.startswith("tensortap")]


def test_attaching_and_closing_while_fit_runs(make, fit, bare_weights, memory):
    """A callback may begin and end watching in the middle of an epoch."""

    class Middle(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                self.tap = tt.watch(self.model, "last", to=memory)
            elif batch == 1:
                self.tap.close()

    model = make()
    fit(model, epochs=2, callbacks=[Middle()])
    assert len(memory.records) == 2
    assert_same_to_rounding(bare_weights(epochs=2), weights(model))


def test_closing_in_the_first_fit(make, fit, memory):
    """Where no function was there before, `fit` goes on with a new one."""
    model = make()
    tap = tt.watch(model, "last", to=memory)
    fit(model, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: tap.close())])
    assert steps(memory) == [0]


def test_compiling_again(make, fit, memory):
    """A model that is compiled anew while it is watched stays watched."""
    model = make()
    with tt.watch(model, "last", to=memory):
        fit(model)
        model.compile("sgd", "mae")
        fit(model)
    assert steps(memory) == list(range(6))
    fit(model)


@pytest.mark.thorough  # the contract has two taps
def test_two_taps(make, fit, memory):
    """Each sees what it asked for; closing one leaves the other."""
    model, other = make(), tt.Memory()
    first, second = tt.watch(model, "first", to=memory), tt.watch(model, "last", to=other)
    fit(model)
    first.close()
    fit(model)
    second.close()
    assert (places(memory), steps(memory)) == (["first:output"], [0, 1, 2])
    assert (places(other), steps(other)) == (["last:output"], list(range(6)))


def test_several_steps_in_one_call(make, fit, memory):
    """With `steps_per_execution` the last of them is seen, and the others are counted and said."""
    model = make(steps_per_execution=3)
    with pytest.warns(tt.TensortapWarning, match="steps_per_execution=1"), tt.watch(model, "last", to=memory) as tap:
        fit(model)
    assert steps(memory) == [0] and tap.counts["overwritten_runs"] == 2


@compiled_once
def test_a_custom_loop(data, memory, jit):
    """A `GradientTape` inside a `tf.function`: outputs, gradients, and weights that are the same to rounding."""

    def train(watched):
        keras.utils.set_random_seed(3)
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, "tanh", name="a"), keras.layers.Dense(1, name="b")]
        )
        optimizer = keras.optimizers.SGD(0.1)

        @tf.function(jit_compile=jit)
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
            optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
            return loss

        if not watched:
            for i in range(3):
                step(data[0][i::3][:13], data[1][i::3][:13])
            return weights(model)
        with tt.watch(model, "**:{output,grad_output,grad}", to=memory) as tap:
            for i in range(3):
                tap.step(loss=step(data[0][i::3][:13], data[1][i::3][:13]))
        return weights(model)

    assert_same_to_rounding(train(False), train(True))
    assert steps(memory) == [0, 1, 2]
    assert {"a:output", "b:grad_output", "a.kernel:grad", ":output"} <= set(places(memory))
    assert all(len(records) == 1 for records in by_place(memory).values())


def test_a_function_that_outlives_its_taps(data, memory):
    """What was traced while watched computes the same afterwards, writes nothing and holds no memory."""
    model = keras.Sequential([keras.layers.Dense(1, name="a")])
    bare = model(data[0]).numpy()
    run = tf.function(model)
    with tt.watch(model, "a", to=memory) as tap:
        run(data[0])
        (function,) = tap._adapter._taps.backend.observer.graphs._functions
        assert function.held[0]._variable.shape.rank is None and function.held[0]._variable.numpy().size == 40
    assert_same_to_rounding(run(data[0]), bare)
    assert function.held[0]._variable.numpy().size == 0
    assert len(memory.records) == 1


def test_an_error_while_tracing(data, memory):
    """The model's own error comes out of `fit` as it is, and the next step is recorded."""

    class Net(keras.Model):
        broken = True

        def __init__(self):
            super().__init__()
            self.a = keras.layers.Dense(1)

        def call(self, x):
            y = self.a(x)
            if self.broken and not keras.src.backend.common.symbolic_scope.in_symbolic_scope():
                raise ValueError("broken on demand")
            return y

    model = Net()
    model.compile("sgd", "mse")
    with tt.watch(model, "a", to=memory):
        with pytest.raises(ValueError, match="broken on demand"):
            model.fit(*data, batch_size=40, verbose=0)
        model.broken = False
        model.make_train_function(force=True)
        model.fit(*data, batch_size=40, verbose=0)
    assert len(memory.records) == 1


def test_a_custom_loop_without_marks(data, memory):
    """Runs of a user's own function that nothing tells apart are counted, and the way out is said."""
    model = keras.Sequential([keras.layers.Dense(1, name="a")])
    run = tf.function(model)
    model(data[0])
    with pytest.warns(tt.TensortapWarning, match=r"tap\.step\(\)"), tt.watch(model, "a", to=memory) as tap:
        for _ in range(3):
            run(data[0])
    assert tap.counts["overwritten_runs"] == 2
