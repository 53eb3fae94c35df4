"""Run with KERAS_BACKEND set: train with and without taps and print what was seen; with `everything`, more."""

from __future__ import annotations

import json
import sys
import warnings

import keras
import numpy as np

import tensortap as tt
from tensortap.integrations.keras import Watch


class Drawn(keras.Initializer):
    """Weights by NumPy: JAX compiles a program to draw each shape, which takes longer than a step of training."""

    def __call__(self, shape, dtype=None):
        scale = 1 / np.sqrt(shape[0])
        return keras.ops.convert_to_tensor(np.random.uniform(-scale, scale, shape), dtype)  # Keras sets the seed


def dense(*args, **options):
    return keras.layers.Dense(*args, kernel_initializer=Drawn(), **options)


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = [dense(8, activation="relu"), dense(8)]
        self.head = dense(1)

    def call(self, x):
        for layer in self.body:
            x = layer(x)
        return self.head(x)


def make():
    keras.utils.set_random_seed(0)
    model = Net()
    model(keras.Input((6,)))  # builds it, and compiles nothing
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def main(everything):
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    train = {"batch_size": 16, "shuffle": False, "verbose": 0}
    bare, tapped, memory = make(), make(), tt.Memory()
    bare.fit(x, y, **train)
    probes = ("**:{output,grad_output,param,grad}", tt.probe("head:input", when=tt.every(2)))
    tapped.fit(x, y, callbacks=[Watch(*probes, to=memory)], **train)
    found = {
        "backend": keras.backend.backend(),
        "equal": all(map(same, tapped.get_weights(), bare.get_weights())),
        "records": sorted([r.step, str(r.place)] for r in memory.records),
        "left": [n for n, v in vars(tapped).items() if type(v).__module__.startswith("tensortap")],
        "refused": refused(tapped),
        "half": half(x, y),
        "masked": masked(),
    }
    print(json.dumps(found | (more(tapped, x, y, train) if everything else {})))


def more(tapped, x, y, train):
    """What other tests have on TensorFlow: triggers, capturing, predicting, verifying, phases."""
    some, predicted = tt.Memory(), tt.Memory()
    limit = tt.probe("head", when=tt.metric("loss") > 1e9)
    tapped.fit(x, y, callbacks=[Watch(limit, to=some)], **train)
    eager = tt.capture(tapped, keras.ops.convert_to_tensor(x), "head", "body.1")
    with tt.watch(tapped, tt.probe("head", keep=tt.full()), to=predicted):
        output = tapped.predict(x, batch_size=40, verbose=0)
    return {
        "unwanted": len(some.records),
        "captured": {name: list(value.shape) for name, value in eager.items()},
        "predicted": bool(np.array_equal(predicted.tensors[0].array, output)),  # of one and the same run
        "verified": bool(tt.verify(tapped, keras.ops.convert_to_tensor(x), repeats=1)),
        "high": high_losses(x, y, train),
        "phases": phases(x, y),
    }


def same(a, b):
    """The same bits where everything runs eagerly, to rounding where a step is compiled anew."""
    if keras.backend.backend() == "torch":
        return np.array_equal(a, b)
    return np.allclose(a, b, rtol=1e-5, atol=1e-6)


def refused(model):
    """Single operations are TensorFlow's only."""
    try:
        tt.watch(model, "op:MatMul", to=tt.Memory()).close()
    except tt.TensortapError as error:
        return "TensorFlow backend only: choose that backend, or name the value" in str(error)
    return False


def high_losses(x, y, train):
    """The steps whose loss is above the median, by all losses and by the trigger."""
    every, some, losses = make(), make(), []

    class Sink:
        def write(self, step):
            losses.append(step.metrics["loss"])

        def close(self):
            pass

    with tt.watch(every, "head", to=Sink()):
        every.fit(x, y, **train)
    limit, memory = sorted(losses)[1], tt.Memory()
    with tt.watch(some, tt.probe("head", when=tt.metric("loss") > limit), to=memory):
        some.fit(x, y, **train)
    return [[i for i, loss in enumerate(losses) if loss > limit], sorted(r.step for r in memory.records)]


def phases(x, y):
    """What `evaluate`, `predict` and single batches are called."""
    model, memory = make(), tt.Memory()
    with tt.watch(model, "head", to=memory):
        model.evaluate(x, y, batch_size=20, verbose=0)
        model.predict(x, batch_size=20, verbose=0)
        model.train_on_batch(x, y)
    return [record["phase"] for record in memory.records]


def half(x, y):
    """A model that computes in bfloat16, with a layer that is used twice; watched before `fit` has built anything."""
    given, twice = keras.Input((6,)), dense(6, name="twice", dtype="mixed_bfloat16")
    model, memory = keras.Model(given, dense(1)(twice(twice(given)))), tt.Memory()
    model.compile("adam", "mse", metrics=["mae"])
    with tt.watch(model, "twice:{output,grad_output}", to=memory) as tap:
        model.fit(x, y, batch_size=40, verbose=0)
    return [sorted([str(r.place), r.call, r["dtype"]] for r in memory.records), dict(tap.counts)]


def masked():
    """Layers that hang masks on tensors, take them off and ask for them train as they do without taps."""
    ids, weights = np.random.default_rng(2).integers(0, 9, (12, 6)), []
    for probes in ((), ("**:{output,input,grad_output,grad_input}",)):
        keras.utils.set_random_seed(0)
        given = keras.Input((6,), dtype="int32")
        words = keras.layers.Embedding(9, 4, Drawn(), mask_zero=True)(given)
        both = keras.layers.Add()(
            [words, keras.layers.MultiHeadAttention(2, 2, kernel_initializer=Drawn())(words, words)]
        )
        model = keras.Model(given, dense(1, activation="sigmoid")(keras.layers.GlobalAveragePooling1D()(both)))
        model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
        callbacks = [Watch(*probes, to=tt.Memory())] if probes else []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # parts of an attention layer that do not run
            model.fit(ids, np.ones((12, 1)), batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
        weights.append(model.get_weights())
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*weights, strict=True))


if __name__ == "__main__":
    main(everything="everything" in sys.argv[1:])
