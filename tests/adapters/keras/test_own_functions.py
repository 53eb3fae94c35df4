"""Functions of the user's own that were traced before the model was watched."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from rounding import ATOL, RTOL, assert_same_to_rounding
from tensorflow.core.function.polymorphism import function_cache
from tensorflow.python.eager.polymorphic_function import tracing_compilation

import tensortap as tt
from tensortap.adapters.keras.graphs.retracing import RETRACING, TappedScope

X = np.random.default_rng(0).normal(size=(12, 6)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Own:
    """A model with a training step of one's own, which counts how often its body runs in Python."""

    def __init__(self, **options):
        keras.utils.set_random_seed(3)
        self.model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, "tanh", name="a"), keras.layers.Dense(1, name="b")]
        )
        self.optimizer = keras.optimizers.SGD(0.1)
        self.traced = 0
        self.step = tf.function(self._step, **options)

    def _step(self, x, y):
        self.traced += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x, training=True) - y))
        self.optimizer.apply(tape.gradient(loss, self.model.trainable_weights), self.model.trainable_weights)
        return loss

    def train(self, tap=None, steps=2, size=12):
        for _ in range(steps):
            loss = self.step(tf.constant(X[:size]), tf.constant(Y[:size]))
            if tap is not None:
                tap.step(loss=loss)

    @property
    def weights(self):
        return [weight.numpy() for weight in self.model.weights]


def steps(memory):
    return sorted({record.step for record in memory.records})


def tapped(function):
    """The contexts of a function's traces that were made with taps."""
    return [
        context for context in function._function_cache._dispatch_dict if isinstance(context.scope_type, TappedScope)
    ]


SIGNATURE = [tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"jit_compile": True}, marks=pytest.mark.thorough),
        pytest.param({"input_signature": SIGNATURE}, marks=pytest.mark.thorough),
        pytest.param({"reduce_retracing": True}, marks=pytest.mark.thorough),
        pytest.param({"autograph": False}, marks=pytest.mark.thorough),
    ],
    ids=["graph", "xla", "signature", "relaxed", "plain"],
)
def test_traced_before(memory, options):
    """Watching traces once more, closing not at all, watching again at most once; weights agree to rounding."""
    bare, own = Own(**options), Own(**options)
    bare.train(steps=8)
    own.train()
    before = own.traced
    for i in (1, 2):
        probe = tt.probe("**:{output,grad_output,grad}", keep=tt.stats())
        with tt.watch(own.model, probe, to=memory) as tap:
            own.train(tap)
        assert own.traced == before + i
        assert steps(memory) == [0, 1]
    own.train()
    assert own.traced == before + 2
    assert {"a:output", "b:grad_output", "a.kernel:grad", ":output"} <= {str(r.place) for r in memory.records}
    assert len(memory.records) == 2 * 2 * 10
    assert_same_to_rounding(bare.weights, own.weights)


def test_first_traced_while_watched(memory):
    """What was first traced with taps is traced once without them after closing, and holds nothing of ours."""
    own = Own()
    with tt.watch(own.model, "a", to=memory) as tap:
        own.train(tap)
        assert own.traced == 1 and len(tapped(own.step)) == 1
    own.train()
    own.train()
    assert own.traced == 2 and not tapped(own.step)
    assert steps(memory) == [0, 1]


def test_other_functions_keep_their_traces(memory):
    """A function that has nothing to do with the model is not traced anew, whether it was traced before or not."""
    own, other = Own(), Own()
    own.train()
    other.train()
    with tt.watch(own.model, "a", to=memory) as tap:
        own.train(tap)
        other.train()
        late = Own()
        late.train()
        assert other.traced == 1 and late.traced == 1
    late.train()
    assert (own.traced, other.traced, late.traced) == (2, 1, 1)


def test_two_taps_on_a_function(memory):
    """A second tap traces once more; when it goes, the first one's traces are there still."""
    own, other = Own(), tt.Memory()
    own.train()
    first = tt.watch(own.model, "a", to=memory)
    own.train(first)
    second = tt.watch(own.model, "b", to=other)
    for _ in range(2):
        own.train(steps=1)
        first.step()
        second.step()
    second.close()
    own.train(first)
    assert own.traced == 3
    first.close()
    own.train()
    assert own.traced == 3 and not tapped(own.step)
    assert (steps(memory), steps(other)) == ([0, 1, 2, 3, 4, 5], [0, 1])


def test_two_models(memory):
    """A function is traced anew for the models that it uses only."""
    one, two, other = Own(), Own(), tt.Memory()
    one.train()
    two.train()
    with tt.watch(one.model, "a", to=memory) as first:
        one.train(first)
        with tt.watch(two.model, "a", to=other) as second:
            one.train(first)
            two.train(second)
    assert (one.traced, two.traced) == (2, 2)
    assert (steps(memory), steps(other)) == ([0, 1, 2, 3], [0, 1])


def test_functions_within_functions(memory):
    """A function is traced anew also where only one that it calls uses the model, in a loop or a branch too."""
    own, traced = Own(), []
    inner = tf.function(lambda x: traced.append("inner") or own.model(x))

    @tf.function
    def outer(x):
        traced.append("outer")
        return tf.cond(tf.reduce_sum(x) < 1e9, lambda: inner(x) + 1.0, lambda: x[:, :1])

    expected = outer(X).numpy()
    traced.clear()
    with tt.watch(own.model, tt.probe("b", keep=tt.full()), to=memory) as tap:
        assert_same_to_rounding(expected, outer(X))
        tap.step()
        assert_same_to_rounding(expected, inner(X).numpy() + 1.0)
    assert traced == ["outer", "inner"] and steps(memory) == [0, 1]
    for tensor in memory.tensors:
        assert_same_to_rounding(expected, tensor.array + 1.0)
    outer(X)
    assert traced == ["outer", "inner"]


def test_a_wider_signature(memory):
    """Where one old trace serves several shapes, one new trace does."""
    own = Own()
    own.step.get_concrete_function(*SIGNATURE)
    for size in (12, 8):
        own.train(size=size)
    assert own.traced == 1
    with tt.watch(own.model, "a", to=memory) as tap:
        for size in (12, 8, 5):
            own.train(tap, steps=1, size=size)
    own.train(size=7)
    assert own.traced == 2
    assert [record["shape"] for record in memory.records] == [(12, 4), (8, 4), (5, 4)]


def test_new_shapes_while_watched(memory):
    """With `reduce_retracing` a shape that is new while watched widens the signature, as it does otherwise."""
    own, bare = Own(reduce_retracing=True), Own(reduce_retracing=True)
    own.train(size=12)
    with tt.watch(own.model, "a", to=memory) as tap:
        for size in (12, 8, 7, 5):
            own.train(tap, steps=1, size=size)
    assert own.traced == 3 and steps(memory) == [0, 1, 2, 3]
    own.train(size=12)
    assert own.traced == 3
    for size in (12, 12, 12, 8, 7, 5, 12, 12):
        bare.train(steps=1, size=size)
    assert_same_to_rounding(bare.weights, own.weights)


@pytest.mark.parametrize("watched", [False, True], ids=["before", "while watched"])
def test_variables_made_on_the_first_call(memory, watched):
    """A function that builds its model when it is first called goes on with the same variables."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Dense(4, name="a"), keras.layers.Dense(1, name="b")])
    run = tf.function(model)
    expected = None if watched else run(X).numpy()
    with tt.watch(model, "a", to=memory) as tap:
        first = run(X).numpy()
        tap.step()
        assert np.array_equal(run(X).numpy(), first)
    assert_same_to_rounding(first if watched else expected, run(X))
    assert steps(memory) == [0, 1] and len(model.variables) == 4 and not tapped(run)


def test_a_method(memory):
    """A decorated method has a function for each object."""

    class Trainer(tf.Module):
        def __init__(self):
            super().__init__()
            self.own, self.traced = Own(), 0

        @tf.function
        def run(self, x):
            self.traced += 1
            return self.own.model(x)

    one, two = Trainer(), Trainer()
    for trainer in (one, two):
        trainer.run(X)
    with tt.watch(one.own.model, "a", to=memory) as tap:
        for trainer in (one, two, one):
            trainer.run(X)
            tap.step()
    assert (one.traced, two.traced) == (2, 1) and steps(memory) == [0, 2]
    one.run(X)
    assert one.traced == 2


def test_an_error_in_the_new_trace(memory):
    """It comes out as it is; the next call is traced and recorded, and the old trace is given back."""
    own = Own()
    own.train()
    fine, own.optimizer = own.optimizer, None
    with tt.watch(own.model, "a", to=memory) as tap:
        with pytest.raises(AttributeError, match="apply"):
            own.train(tap)
        own.optimizer = fine
        own.train(tap)
    traced = own.traced
    own.train()
    assert own.traced == traced == 3
    assert steps(memory) == [0, 1]


def test_beside_fit(make, fit, memory):
    """`fit` and a function of one's own are seen by one tap, and both go on with what they had."""
    model, traced = make(), []
    run = tf.function(lambda x: traced.append(x) or model(x))
    fit(model)
    before = model.train_function
    run(X)
    with tt.watch(model, "last", to=memory) as tap:
        fit(model)
        tap.step()
        run(X)
        tap.step()
        fit(model)
    fit(model)
    run(X)
    assert model.train_function is before and len(traced) == 2
    assert [record["phase"] for record in memory.records].count("train") == 6 and len(memory.records) == 7


def test_a_model_without_variables(memory):
    """It leaves nothing in a trace that it could be known by, so every function is traced anew."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.ReLU(name="relu")])
    traced = []
    run = tf.function(lambda x: traced.append(x) or model(x))
    run(X)
    with tt.watch(model, "relu", to=memory):
        run(X)
    run(X)
    assert len(memory.records) == 1 and len(traced) == 2


def test_nothing_stays(memory):
    """After closing TensorFlow has its own function back; a function dropped meanwhile is free to go."""
    before, own = tracing_compilation._maybe_define_function, Own()
    own.train()
    with tt.watch(own.model, "a", to=memory):
        own.train(steps=1)
        dropped = Own()
        run = tf.function(lambda x: own.model(dropped.model(x) * x))
        run(X)
        gone = weakref.ref(run)
        del run
        gc.collect()
        assert gone() is None
    assert tracing_compilation._maybe_define_function is before
    assert not RETRACING._kept and not RETRACING._models.active
    assert own.step.experimental_get_tracing_count() == 1


@pytest.mark.filterwarnings("ignore:a traced function ran more than once")
def test_threads(memory):
    """Taps that come and go while other threads call the function change no result and leave no trace of theirs."""
    own, stop, wrong = Own(), threading.Event(), []
    run = tf.function(own.model)
    expected = run(X).numpy()

    def serve():
        while not stop.is_set():
            try:
                if not np.allclose(run(X).numpy(), expected, rtol=RTOL, atol=ATOL):
                    wrong.append("another result")
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            with tt.watch(own.model, "**", to=tt.Memory()) as tap:
                run(X)
                tap.step()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    with tt.watch(own.model, "a", to=memory):
        run(X)
    assert not tapped(run) and len(memory.records) == 1


def test_somebody_elses_stand_in(memory):
    """Who goes around TensorFlow's function after us keeps what he has put there, and is called as before."""
    own, called = Own(), []
    own.train()
    with tt.watch(own.model, "a", to=memory) as tap:
        ours = tracing_compilation._maybe_define_function

        @functools.wraps(ours)
        def theirs(args, kwargs, tracing_options):
            called.append(tracing_options.name)
            return ours(args, kwargs, tracing_options)

        tracing_compilation._maybe_define_function = theirs
        own.train(tap)
    assert tracing_compilation._maybe_define_function is theirs
    own.train()
    assert own.traced == 2 and not tapped(own.step)
    with tt.watch(own.model, "b", to=memory) as tap:
        own.train(tap)
    assert own.traced == 3 and steps(memory) == [0, 1] and "_step" in called
    tracing_compilation._maybe_define_function = ours.__wrapped__


def test_another_tensorflow(monkeypatch, memory):
    """Where its inside is not as we know it, that is said and counted; a function made afterwards is seen."""
    own = Own()
    own.train()
    monkeypatch.delattr(function_cache.FunctionCache, "generalize")
    with pytest.warns(tt.TensortapWarning, match="traced before"), tt.watch(own.model, "a", to=memory) as tap:
        own.train(tap)
        run = tf.function(own.model)
        run(X)
    assert tap.counts["unseen_functions"] == 1 and own.traced == 1
    assert steps(memory) == [2]


def test_a_concrete_function_that_is_kept(memory):
    """One from before runs as it was traced; one made while watched is seen, and records nothing after closing."""
    own = Own()
    run = tf.function(own.model)
    before = run.get_concrete_function(tf.constant(X))
    with tt.watch(own.model, "a", to=memory) as tap:
        expected = before(tf.constant(X)).numpy()
        tap.step()
        meanwhile = run.get_concrete_function(tf.constant(X))
        assert_same_to_rounding(expected, meanwhile(tf.constant(X)))
    assert_same_to_rounding(expected, meanwhile(tf.constant(X)))
    assert steps(memory) == [1] and not tapped(run)
