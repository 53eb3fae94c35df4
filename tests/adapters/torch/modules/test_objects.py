"""Tensors inside objects that a module is given or returns."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils import _pytree

from tensortap.adapters.torch.modules.nested import tensors_in


class Cache:
    """An object as libraries write them: attributes, a list of further objects, a property with an effect."""

    def __init__(self, *layers):
        self.layers = [Slotted(layer) for layer in layers]
        self.length = len(layers)
        self.asked = 0

    @property
    def total(self):
        self.asked += 1
        return torch.zeros(1)


class Slotted:
    __slots__ = ("keys", "never")

    def __init__(self, keys):
        self.keys = keys


@dataclasses.dataclass
class Result:
    value: object
    note: str = ""


class Closed:
    """Has neither `__dict__` nor slots."""

    __slots__ = ()


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.fc, self.make = nn.Linear(3, 3), make

    def forward(self, x):
        return self.make(self.fc(x))


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda x: Cache(x, x + 1), [".layers[0].keys", ".layers[1].keys"]),
        (lambda x: (x, Cache(x)), ["[0]", "[1].layers[0].keys"]),
        (lambda x: Result({"a": Slotted(x)}), [".value.a.keys"]),
        (lambda x: torch.distributions.Normal(x, x.exp()), [".loc", ".scale"]),
    ],
)
def test_tensors_in_objects_are_recorded(watch, same, make, slots):
    """Attributes and slots of any object are looked into, with their gradients, and no property runs."""
    model, x = Returns(make), torch.randn(2, 3)
    seen = watch(model, ":output", ":grad_output")
    output = model(x)
    tensors = dict(tensors_in(output))
    sum(t.sum() for t in tensors.values()).backward()
    seen.tap.step()
    assert list(tensors) == slots
    assert all(same(seen.one(f":output{slot}"), tensor) for slot, tensor in tensors.items())
    assert {f":grad_output{slot}" for slot in slots} <= set(seen.places)
    assert not any(isinstance(o, Cache) and o.asked for o in (output, *(output if isinstance(output, tuple) else ())))


def test_cycles_end():
    """An object that refers to itself is entered once, and modules are not entered at all."""
    one, other = Result(None), Result(None)
    one.value, other.value = [other, torch.ones(1), nn.Linear(2, 2)], one
    assert [slot for slot, _ in tensors_in(one)] == [".value[1]"]


def test_what_cannot_be_entered_is_counted_and_named(watch):
    """Objects without attributes are counted, their type is named, and what else there is is recorded."""
    model = Returns(lambda x: (x, Closed(), (t for t in [x])))
    seen = watch(model, ":output")
    with pytest.warns(UserWarning, match=r"objects of .*(Closed|generator).* objects_not_entered"):
        model(torch.randn(2, 3))
    seen.tap.step()
    assert seen.places == [":output[0]"] and seen.tap.counts["objects_not_entered"] == 2


def test_classes_without_attributes_are_entered_by_their_registration():
    """A class that is registered with pytree and shows nothing itself is flattened."""

    class Packed:
        __slots__ = ()

    _pytree.register_pytree_node(Packed, lambda _: ([torch.ones(1), torch.ones(2)], None), lambda *_: Packed())
    assert [slot for slot, _ in tensors_in(Packed())] == ["[0]", "[1]"]


def test_large_graphs_of_objects_are_bounded():
    """A list of very many objects is entered as far as the budget goes, and the rest is told."""
    missed = []
    found = tensors_in([Result(torch.ones(1)) for _ in range(1000)], missed.append)
    assert len(found) == 512 and missed == [Result] * 488


class Batch:
    """What graph libraries give to their models: no container, no dataclass."""

    def __init__(self, x, edges):
        self.x, self.edges, self.name = x, edges, "cora"


class SlottedBatch:
    """Takes no weak reference."""

    __slots__ = ("edges", "x")

    def __init__(self, x, edges):
        self.x, self.edges = x, edges


class Graph(nn.Module):
    """Hands the object that it is given on to a module in it, with a tensor beside it."""

    def __init__(self):
        super().__init__()
        self.layer = GraphLayer()

    def forward(self, batch):
        return self.layer(batch.x, batch) + batch.edges


class GraphLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, x, batch):
        return self.fc(x) * batch.edges


def test_objects_that_modules_are_given(watch, same):
    """An object is looked into where it is given first in a step; further modules count it."""
    model, batch = Graph(), Batch(torch.randn(2, 3), torch.ones(2, 3))
    seen = watch(model, "**:input")
    for _ in range(2):
        model(batch)
        seen.tap.step()
    assert set(seen.places) == {":input.batch.x", ":input.batch.edges", "layer:input", "layer.fc:input"}
    assert seen.tap.counts == {"objects_given_again": 2} and len(seen.places) == 8
    assert same(seen.records[1], batch.edges) or same(seen.records[0], batch.edges)


def test_objects_without_weak_references_are_read_wherever_they_are_given(watch):
    """Nothing else could tell that it is the same object."""
    seen = watch(Graph() if (model := Graph()) is None else model, "**:input")
    model(SlottedBatch(torch.randn(2, 3), torch.ones(2, 3)))
    seen.tap.step()
    assert {"layer:input.batch.x", ":input.batch.x"} <= set(seen.places) and not seen.tap.counts


def test_gradients_of_what_objects_hold(watch):
    """Gradients of inputs come for tensors in objects too."""
    model = Graph()
    seen = watch(model, ":grad_input")
    model(Batch(torch.randn(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True))).sum().backward()
    seen.tap.step()
    assert set(seen.places) == {":grad_input.batch.x", ":grad_input.batch.edges"}


@pytest.mark.filterwarnings("ignore:.*objects_not_entered")
def test_objects_in_compiled_code_are_counted(watch):
    """The compiler traces containers only; what else a module is given or returns is counted by type."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Returns(lambda x: Cache(x))

        def forward(self, x):
            return self.inner(x).layers[0].keys * 2

    model = Outer()
    seen = watch(model, "**")
    fast = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(2):
        fast(torch.randn(2, 3))
        seen.tap.step()
    assert seen.tap.counts["objects_not_entered"] == 2
    assert seen.places.count("inner.fc:output") == 2
