"""Networks that are written as methods of one class: the methods are the layers."""

from __future__ import annotations

import copy
import gc
import pickle

import numpy as np
import pytest

import tensortap as tt

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


class Tutorial:
    """The way tutorials write a network."""

    def __init__(self):
        rng = np.random.default_rng(1)
        self.params = {"W1": rng.normal(size=(4, 8)), "W2": rng.normal(size=(8, 2))}
        self.seen = 0

    def conv_layer(self, x):
        return x @ self.params["W1"]

    @staticmethod
    def relu(x):
        return np.maximum(x, 0)

    def fc(self, x, scale=1.0):
        return (x @ self.params["W2"]) * scale

    def accuracy(self, labels):
        return "unknown"

    def reset(self):
        self.seen = 0

    def forward(self, x):
        return self.fc(self.relu(self.conv_layer(self.relu(x))), scale=2.0)


class Deeper(Tutorial):
    """Redefines one of them."""

    def relu(self, x):
        return np.maximum(super().relu(x), 0.5)


class Unusual:
    """Is called by a name that nobody knows for one."""

    def __init__(self):
        self.weight = np.ones((4, 2), np.float32)

    def scores(self, x):
        return x @ self.weight


class Mixed(Tutorial):
    """Holds a layer beside its methods."""

    def __init__(self):
        super().__init__()
        self.head = Tutorial()


def places(memory):
    return [(r.step, str(r.place), r.call) for r in memory.records]


@pytest.mark.parametrize("cls", [Tutorial, Deeper])
def test_methods_are_watched_by_default(cls):
    """Every method that takes and returns arrays is a site, and each of its calls a record."""
    net, memory, before = cls(), tt.Memory(), [dict(vars(base)) for base in cls.__mro__[:-1]]
    bare = net.forward(X)
    with tt.watch(net, to=memory) as tap:
        outputs = [net.forward(X) for _ in range(2)]
    one = [("relu:output", 0), ("conv_layer:output", 0), ("relu:output", 1), ("fc:output", 0), (":output", 0)]
    assert places(memory) == [(step, place, call) for step in (0, 1) for place, call in one]
    assert tap.counts == {} and all(np.array_equal(output, bare) for output in outputs)
    assert [dict(vars(base)) for base in cls.__mro__[:-1]] == before


def test_a_pattern_names_a_method():
    """One method by its name, inputs by their parameters' names; a name misspelt is answered with the right one."""
    net, memory = Tutorial(), tt.Memory()
    with tt.watch(net, "fc:{input,output}", "conv_layer", to=memory):
        net.forward(X)
    assert places(memory) == [(0, "conv_layer:output", 0), (0, "fc:input", 0), (0, "fc:output", 0)]
    with pytest.raises(tt.TensortapError, match="Did you mean 'conv_layer'"):
        tt.watch(net, "conv_lyer", to=memory)
    with tt.watch(net, "accuracy", to=memory) as tap:
        net.accuracy(X)
    assert tap.counts == {"unseen": 1}


def test_quick_looks():
    """`sites`, `capture` and `verify` know the methods."""
    net = Tutorial()
    assert [site.path for site in tt.sites(net) if site.types == ("method",)] == [
        "conv_layer",
        "relu",
        "fc",
        "accuracy",
    ]
    found = tt.capture(net, X, "relu", "conv_layer")
    assert np.array_equal(found["conv_layer"], np.maximum(X, 0) @ net.params["W1"])
    assert list(found) == ["relu", "conv_layer", "relu#1"]
    assert tt.verify(net, X, repeats=1)


def test_steps_of_an_object_without_a_known_call():
    """Its methods are seen; where steps end must be said, and that is said."""
    net, memory = Unusual(), tt.Memory()
    with pytest.warns(tt.TensortapWarning, match=r"close each with tap.step\(\)"), tt.watch(net, to=memory):
        net.scores(X)
    memory.records.clear()
    with tt.watch(net, "scores", to=memory) as tap:
        for _ in range(2):
            net.scores(X)
            tap.step()
    assert places(memory) == [(0, "scores:output", 0), (1, "scores:output", 0)]


def test_an_object_that_holds_layers():
    """Its layers are watched; of a method it is said what to write instead."""
    net = Mixed()
    with pytest.raises(tt.TensortapError, match=r"'relu' cannot be tapped.*tensortap\.tap\(x"):
        tt.watch(net, "relu", to=tt.Memory())
    memory = tt.Memory()
    with tt.watch(net, "head", to=memory) as tap:
        net.head.forward(X)
        tap.step()
    assert [str(r.place) for r in memory.records] == ["head:output"]


def test_copies_and_siblings_are_not_watched():
    """Another object of the class, a copy and a pickle run as they did; two taps see the same object."""
    net, other, one, two = Tutorial(), Tutorial(), tt.Memory(), tt.Memory()
    with tt.watch(net, "fc", to=one), tt.watch(net, "relu", to=two):
        other.forward(X)
        copy.deepcopy(net).forward(X)
        pickle.loads(pickle.dumps(net)).forward(X)
        assert not one.records and not two.records
        net.forward(X)
    assert len(one.records) == 1 and len(two.records) == 2
    assert type(vars(Tutorial)["relu"]) is staticmethod


def test_an_object_that_is_gone():
    """A watched object that dies is forgotten, and its class restored when the tap closes."""
    net = Tutorial()
    tap = tt.watch(net, "fc", to=tt.Memory())
    del net
    gc.collect()
    Tutorial().forward(X)
    tap.close()
    assert type(vars(Tutorial)["fc"]).__name__ == "function"
