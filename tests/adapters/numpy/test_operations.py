"""Single operations inside layers, where they are asked for."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tt
from tensortap.adapters.numpy.traced import Traced

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


class Attention:
    """Every spelling of a product, and caches of all kinds."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.weight = rng.normal(size=(3, 3)).astype(np.float32)
        self.cache = None
        self.history = []

    def __call__(self, x):
        q = x @ self.weight
        k = np.matmul(x, self.weight)
        s = np.einsum("ij,kj->ik", q, k)
        self.cache = (q, {"k": k})
        self.history.append(s)
        s -= s.max(axis=1, keepdims=True)
        p = np.exp(s)
        p /= p.sum(axis=1, keepdims=True)
        return p.dot(np.dot(x, self.weight)), x


class Net:
    def __init__(self):
        self.attention = Attention()
        self.head = np.eye(3, dtype=np.float32)

    def __call__(self, x):
        mixed, same = self.attention(x)
        return mixed @ self.head + same


def test_every_spelling_of_a_product_is_seen(watch):
    """`@`, matmul, dot, the method dot and einsum are operations of the layer they run in, numbered by kind."""
    model = Net()
    seen = watch(model, "op:@matmul")
    model(X)
    seen.tap.step()
    attention = ["matmul#0", "matmul#1", "einsum#0", "dot#0", "dot#1"]
    assert seen.places == [*(f"attention/{op}:output" for op in attention), "/matmul#0:output"]
    expected = X @ model.attention.weight
    assert seen.of("attention/matmul#0:output")[0]["l2"] == tt.summarize(expected).l2


def test_inputs_and_other_operations(watch):
    """What goes into an operation has slots by position; sums and exponentials are operations too."""
    model = Net()
    seen = watch(model, "attention/matmul#0:{input,output}", "attention/{exp,sum,max}")
    model(X)
    seen.tap.step()
    assert seen.places == [
        "attention/matmul#0:input[0]", "attention/matmul#0:input[1]", "attention/matmul#0:output",
        "attention/max#0:output", "attention/exp#0:output", "attention/sum#0:output",
    ]  # fmt: skip


def test_operations_by_layer_and_values_that_are_named(watch):
    """`layer/function` is an operation, any other name with a slash a value; what was seen is not called unseen."""
    model = Net()
    seen = watch(model, "attention/einsum", "attention/sqrt", "/matmul", "my/value", "my/other")
    model(X)
    tt.tap(X, "my/value")
    seen.tap.step()
    assert seen.places == ["attention/einsum#0:output", "/matmul#0:output", "my/value:output"]
    unseen = seen.tap._adapter.unseen()
    assert set(unseen) == {"attention/sqrt", "my/other"}
    assert "operation" in unseen["attention/sqrt"] and "value" in unseen["my/other"]


def test_a_misspelt_operation():
    """It is refused with the nearest names, and nothing is left on the model's classes."""
    before = list(vars(Net).items())
    with pytest.raises(
        tt.TensortapError, match=r"there is no operation 'matmull' among \d+\. Did you mean 'op:matmul'"
    ):
        tt.watch(Net(), "op:matmull", to=tt.Memory())
    assert list(vars(Net).items()) == before


def test_nothing_is_changed(watch):
    """Outputs are the same bits in plain arrays, an input given back is the very same, and caches are plain."""
    bare, model = Net(), Net()
    expected = bare(X)
    history = model.attention.history
    seen = watch(model, "op:*")
    output = model(X)
    assert type(output) is np.ndarray and output.tobytes() == expected.tobytes()
    assert model.attention(X)[1] is X
    seen.tap.step()
    kept = [model.attention.cache[0], model.attention.cache[1]["k"], *model.attention.history]
    assert not any(isinstance(array, Traced) for array in kept)
    assert model.attention.history is history and len(history) == 2
    assert model.attention.cache[0].tobytes() == bare.attention.cache[0].tobytes()


def test_steps_that_nobody_wants_are_given_plain_arrays(watch):
    """With `every(2)` the odd steps run on the arrays themselves."""
    kinds = []

    class Looks:
        def __call__(self, x):
            kinds.append(type(x))
            return x @ x.T

    model = Looks()
    seen = watch(model, tt.probe("op:matmul", when=tt.every(2)))
    for _ in range(4):
        model(X)
    seen.tap.close()
    assert kinds == [Traced, np.ndarray, Traced, np.ndarray]
    assert [r.step for r in seen.records] == [0, 2]


def test_what_is_missed_is_said(watch):
    """A product of arrays that passed np.asarray is not seen, and the reason names it."""

    class Plain:
        def __call__(self, x):
            return np.asarray(x) @ np.asarray(x).T

    model = Plain()
    seen = watch(model, "op:matmul")
    model(X)
    seen.tap.step()
    assert seen.places == []
    assert "np.asarray" in seen.tap._adapter.unseen()["op:matmul"]


def test_an_error_inside_comes_out(watch):
    """The model's own error is the user's, and the next call is seen."""
    model = Net()
    seen = watch(model, "op:matmul")
    with pytest.raises(ValueError, match="matmul"):
        model(X[:, :2])
    model(X)
    seen.tap.step()
    assert len(seen.of("attention/matmul#0:output")) == 1


def test_two_taps(watch):
    """Both see the operations, and numbers are right for each."""
    model = Net()
    first, second = watch(model, "op:matmul"), watch(model, "op:einsum", "attention")
    model(X)
    first.tap.step()
    second.tap.step()
    assert len(first.places) == 3
    assert second.places == ["attention/einsum#0:output", "attention:output[0]", "attention:output[1]"]
