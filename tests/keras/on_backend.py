"""Run with KERAS_BACKEND set: trains with and without taps, and prints as JSON what was seen."""

from __future__ import annotations

import json

import keras
import numpy as np

import tensortap as tt
from tensortap.integrations.keras import Watch


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(8)]
        self.head = keras.layers.Dense(1)

    def call(self, x):
        for layer in self.body:
            x = layer(x)
        return self.head(x)


def make():
    keras.utils.set_random_seed(0)
    model = Net()
    model(np.zeros((1, 6), np.float32))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def main():
    x = np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    train = {"batch_size": 16, "shuffle": False, "verbose": 0}
    bare, tapped, memory, some = make(), make(), tt.Memory(), tt.Memory()
    bare.fit(x, y, **train)
    probes = ("**:{output,grad_output,param,grad}", tt.probe("head:input", when=tt.every(2)))
    tapped.fit(x, y, callbacks=[Watch(*probes, to=memory)], **train)
    limit = tt.probe("head", when=tt.metric("loss") > 1e9)
    tapped.fit(x, y, callbacks=[Watch(limit, to=some)], **train)
    eager = tt.capture(tapped, keras.ops.convert_to_tensor(x), "head", "body.1")
    predicted = tt.Memory()
    with tt.watch(tapped, tt.probe("head", keep=tt.full()), to=predicted):
        output = tapped.predict(x, batch_size=40, verbose=0)
    print(
        json.dumps(
            {
                "backend": keras.backend.backend(),
                "equal": all(map(np.array_equal, make_again(x, y, train), bare.get_weights())),
                "records": sorted([r.step, str(r.place)] for r in memory.records),
                "unwanted": len(some.records),
                "captured": {name: list(value.shape) for name, value in eager.items()},
                "predicted": bool(np.array_equal(predicted.tensors[0].array, output)),
                "left": [n for n, v in vars(tapped).items() if type(v).__module__.startswith("tensortap")],
                "refused": refused(tapped),
                "verified": bool(tt.verify(tapped, keras.ops.convert_to_tensor(x), repeats=1)),
            }
        )
    )


def refused(model):
    """Single operations are TensorFlow's only."""
    try:
        tt.watch(model, "op:MatMul", to=tt.Memory()).close()
    except tt.TensortapError as error:
        return "TensorFlow backend only" in str(error)
    return False


def make_again(x, y, train):
    model = make()
    model.fit(x, y, callbacks=[Watch("**:{output,grad_output,param,grad}", to=tt.Memory())], **train)
    return model.get_weights()


if __name__ == "__main__":
    main()
