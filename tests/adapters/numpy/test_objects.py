"""Objects whose layers are callables, wherever they are held and however they are called."""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

import tensortap as tt
from tensortap.adapters.numpy.function_wrapper import FunctionWrapper

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def double(x):
    return 2 * x


class Scale:
    """Called by `__call__`, which calls `forward`, which a subclass extends."""

    def __init__(self, by=2.0):
        self.by = by

    def __call__(self, x):
        return self.forward(x)

    def forward(self, x):
        return self.by * x


class Shift(Scale):
    def forward(self, x):
        return super().forward(x) + 1


class Pair(NamedTuple):
    first: object
    second: object


class Everywhere:
    """Layers in attributes, lists, dicts, tuples, named tuples and plain holders, all of them called."""

    def __init__(self):
        self.attribute = Scale()
        self.list = [Scale(), [Shift()]]
        self.dict = {"a": Scale(), 3: Shift()}
        self.tuple = (Scale(), (Shift(),))
        self.named = Pair(Scale(), Shift())
        self.holder = SimpleNamespace(inner=Scale())

    def all(self):
        held = [self.attribute, self.list[0], self.list[1][0], self.dict["a"], self.dict[3], self.tuple[0]]
        return [*held, self.tuple[1][0], *self.named, self.holder.inner]

    def __call__(self, x):
        for layer in self.all():
            x = layer(x)
        return x


PATHS = ["attribute", "list.0", "list.1.0", "dict.a", "dict.3", "tuple.0", "tuple.1.0"]
PATHS += ["named.first", "named.second", "holder.inner"]


def test_layers_are_found_wherever_they_are_held(watch):
    """Every one has a path, is seen once a call, and in the order in which they run."""
    model = Everywhere()
    seen = watch(model)
    model(X)
    seen.tap.step()
    assert seen.places == [f"{path}:output" for path in PATHS]
    assert {r["numel"] for r in seen.records} == {6}


def test_a_call_within_a_call_of_one_object_is_seen_once(watch):
    """`__call__`, `forward` and `super().forward` of one layer are one record."""
    model = Everywhere()
    seen = watch(model, "list.1.0:{input,output}")
    model.list[1][0](X)
    seen.tap.step()
    assert seen.places == ["list.1.0:input", "list.1.0:output"]
    assert seen.of("list.1.0:output")[0]["max"] == 3.0


def test_a_direct_forward_is_seen(watch):
    """What does not pass `__call__` is seen all the same."""
    model = Everywhere()
    seen = watch(model, "attribute")
    model.attribute.forward(X)
    seen.tap.step()
    assert seen.places == ["attribute:output"]


class Functions:
    """Plain functions, ufuncs, partials, builtins and bound methods in slots."""

    def __init__(self):
        self.function = double
        self.ufunc = np.tanh
        self.table = {"partial": functools.partial(np.clip, a_min=-0.5, a_max=0.5)}
        self.list = [np.square, self.own]
        self.tuple = (np.negative, (np.abs, 3))

    def own(self, x):
        return x - 1

    def __call__(self, x):
        for function in (self.function, self.ufunc, self.table["partial"], *self.list, self.tuple[0], self.tuple[1][0]):
            x = function(x)
        return x


SLOTS = ["function", "ufunc", "table.partial", "list.0", "list.1", "tuple.0", "tuple.1.0"]


def test_functions_in_slots(watch):
    """Each is seen under its slot, with the array that comes out."""
    model = Functions()
    bare = model(X)
    seen = watch(model)
    assert model(X).tobytes() == bare.tobytes()
    seen.tap.step()
    assert seen.places == [f"{path}:output" for path in SLOTS]
    assert seen.of("ufunc:output")[0]["max"] == pytest.approx(np.tanh(2.0))


def test_slots_are_put_back_exactly(watch):
    """Attributes, lists, dicts and tuples hold the very objects that they held, in the same order."""
    model = Functions()
    before = {name: (id(v), [*map(id, v)] if isinstance(v, (list, tuple)) else 0) for name, v in vars(model).items()}
    first, second = watch(model), watch(model, "tuple.*")
    model(X)
    first.tap.close()
    second.tap.close()
    assert list(vars(model)) == list(before)
    assert {n: (id(v), [*map(id, v)] if isinstance(v, (list, tuple)) else 0) for n, v in vars(model).items()} == before
    assert model.tuple[1][0] is np.abs


def test_a_slot_given_a_new_function_keeps_it(watch):
    """What the user puts into a slot meanwhile is theirs."""
    model = Functions()
    seen = watch(model, "function")
    model.function = np.exp
    seen.tap.close()
    assert model.function is np.exp


def test_a_stand_in_is_what_it_stands_for(watch):
    """Names, attributes, equality and text are those of the function."""
    model = Functions()
    watch(model)
    assert (model.ufunc.nin, model.function.__name__, model.ufunc == np.tanh) == (1, "double", True)
    assert repr(model.function) == repr(double) and hash(model.ufunc) == hash(np.tanh)


@pytest.mark.parametrize("make", [Everywhere, Functions])
def test_copies_and_pickles_carry_no_tap(watch, make):
    """A watched object can be copied and pickled, and what comes out is not watched."""
    model = make()
    bare = model(X)
    seen = watch(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(clone) is make
        assert clone(X).tobytes() == bare.tobytes()
        assert not any(isinstance(value, FunctionWrapper) for value in vars(clone).values())
    seen.tap.close()
    assert seen.places == []


def test_classes_and_types_stay(watch):
    """A watched layer is of its class, and the class is as it was once the tap is closed."""
    model = Everywhere()
    before = [list(vars(cls).items()) for cls in (Scale, Shift, Everywhere)]
    seen = watch(model)
    assert type(model.attribute) is Scale and Scale.forward is before[0][[k for k, _ in before[0]].index("forward")][1]
    seen.tap.close()
    assert [list(vars(cls).items()) for cls in (Scale, Shift, Everywhere)] == before


def test_siblings_are_not_seen(watch):
    """Other objects of the same class leave no record and give what they gave."""
    model, sibling = Everywhere(), Scale(5.0)
    seen = watch(model)
    assert sibling(X).tobytes() == (5.0 * X).tobytes()
    assert sibling.forward.__self__ is sibling
    seen.tap.step()
    assert seen.places == []


def test_a_method_wrapped_by_somebody_else_meanwhile_keeps_the_wrapper(watch):
    """Closing takes away only what is ours."""

    class Own:
        def forward(self, x):
            return x + 1

    model = SimpleNamespace(layer=Own())
    original = Own.forward
    seen = watch(model, "layer")
    theirs = functools.wraps(original)(lambda self, x: original(self, x))
    Own.forward = theirs
    seen.tap.close()
    assert vars(Own)["forward"] is theirs
    assert model.layer.forward(X).tobytes() == (X + 1).tobytes()


def test_objects_with_slots(watch):
    """`__slots__`, without a dict and without weak references, is no obstacle."""

    class Tight:
        __slots__ = ("act", "inner")

        def __init__(self):
            self.act = np.tanh
            self.inner = Scale()

        def __call__(self, x):
            return self.act(self.inner(x))

    model = Tight()
    seen = watch(model, "**:{input,output}")
    model(X)
    seen.tap.close()
    assert sorted(set(seen.places)) == sorted(f"{p}:{q}" for p in ("", "act", "inner") for q in ("input", "output"))
    assert model.act is np.tanh


def test_a_cycle_of_references(watch):
    """A layer that knows its parent is found once."""
    model = Everywhere()
    model.attribute.parent = model
    assert len(tt.sites(model)) == len(PATHS) + 1
