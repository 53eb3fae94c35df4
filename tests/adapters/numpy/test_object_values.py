"""What layers that are plain objects are given, give and hold; and models that cannot be watched."""

from __future__ import annotations

import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from tests.adapters.numpy.test_objects import Everywhere, Scale, Shift, X, double

import tensortap as tt


def test_outputs_of_all_kinds(watch):
    """Scalars, nested values and sparse matrices are read; text, objects and None are passed over."""
    scipy = pytest.importorskip("scipy.sparse")
    values = {
        "scalar": np.float32(3),
        "nested": ({"a": X}, [X, None]),
        "sparse": scipy.csr_matrix(np.eye(3)),
        "text": np.array(["a"]),
        "none": None,
    }
    model = SimpleNamespace(**{name: (lambda x, value=value: value) for name, value in values.items()})
    seen = watch(model)
    for name in values:
        getattr(model, name)(X)
    seen.tap.step()
    found = ["scalar:output", "nested:output[0].a", "nested:output[1][0]", "sparse:output"]
    assert seen.places == found
    assert seen.of("sparse:output")[0]["l1"] == 3
    assert seen.tap._adapter.unseen() == {"text:output": "returned no array", "none:output": "returned no array"}


def test_an_array_changed_in_place_afterwards(watch):
    """Inputs are as they were before an in-place layer, outputs as they were when it returned."""

    class InPlace:
        def __call__(self, x):
            x *= 0
            return x

    model = SimpleNamespace(layer=InPlace())
    seen = watch(model, "layer:{input,output}")
    model.layer(X.copy())
    seen.tap.step()
    assert [r["max"] for r in seen.records] == [1.0, 0.0]


def test_inputs_have_the_names_of_their_parameters(watch):
    """Two arrays given to a layer are told apart by name."""

    class Both:
        def forward(self, left, right=None):
            return left + right

    model = SimpleNamespace(layer=Both())
    seen = watch(model, "layer:input")
    model.layer.forward(X, right=X)
    seen.tap.step()
    assert seen.places == ["layer:input.left", "layer:input.right"]


def test_arrays_that_layers_hold(watch):
    """They are parameters, and are read when the step closes, wherever the attribute points by then."""

    class Dense:
        def __init__(self):
            self.weight = np.ones((2, 2), np.float32)
            self.parts = [np.zeros(3)]
            self.count = np.arange(3)

        def __call__(self, x):
            self.weight = self.weight + 1
            return x @ self.weight

    model = Dense()
    seen = watch(model, "**:param")
    model(np.ones((1, 2), np.float32))
    seen.tap.step()
    assert [(str(r.place), r["mean"]) for r in seen.records] == [("weight:param", 2.0), ("parts.0:param", 0.0)]


def test_steps_of_other_threads(watch):
    """Two threads that call the object each have steps of their own, and nothing is mixed up."""
    model = Everywhere()
    seen = watch(model, "attribute")
    both = threading.Barrier(2)

    def serve():
        for _ in range(20):
            both.wait()
            model(X)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen.tap.close()
    assert len(seen.records) == len({r.step for r in seen.records}) == 40
    assert {r.call for r in seen.records} == {0}


def test_a_root_that_is_never_called(watch):
    """Layers called one by one are seen; that no step could be found is said."""
    layers = [Scale(), Shift()]
    seen = watch(layers, strict=False)
    layers[1](layers[0](X))
    with pytest.warns(tt.TensortapWarning, match=r"close each with tap\.step"):
        seen.tap.close()
    assert seen.places == ["0:output", "1:output"]


def test_a_model_of_another_framework_inside():
    """It is not touched, and sites() says what to do about it."""
    torch = pytest.importorskip("torch")
    model = SimpleNamespace(net=torch.nn.Linear(2, 2), act=np.tanh)
    assert [site.path for site in tt.sites(model)] == ["act"]
    assert "watch it by itself" in tt.sites(model).untappable["net"]


@pytest.mark.parametrize("what", [3, object(), np.tanh, Scale, X, {}, [1, 2]])
def test_what_cannot_be_watched(what):
    """Ufuncs, classes, arrays and objects without layers are refused with the way out."""
    with pytest.raises(tt.TensortapError, match="cannot be watched"):
        tt.watch(what, to=tt.Memory())


def test_on_nonfinite(watch):
    """A NaN that appears in a layer is told with the step."""
    model = SimpleNamespace(log=np.log, act=np.tanh)
    origins = []
    seen = watch(model, "**:{input,output}", on_nonfinite=origins.append)
    with np.errstate(all="ignore"):
        model.act(model.log(np.array([-1.0, 1.0])))
    seen.tap.step()
    assert [(o.site, len(o.inputs)) for o in origins] == [("log", 1)]


def test_verify_restores_caches_and_random_states():
    """An object that keeps a cache and draws numbers is as it was after verify, and found deterministic."""

    class Noisy:
        def __init__(self):
            self.rng = np.random.default_rng(0)
            self.cache = None
            self.inner = Scale()

        def __call__(self, x):
            self.cache = self.inner(x + self.rng.normal(size=x.shape))
            return self.cache

    model = Noisy()
    state = model.rng.bit_generator.state
    proof = tt.verify(model, X, repeats=1)
    assert proof and proof.deterministic
    assert model.cache is None and model.rng.bit_generator.state == state


def test_data_is_not_taken_for_layers():
    """Tables, sparse matrices, weak references, long lists and objects of other libraries are left alone."""
    pandas, scipy = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    model = SimpleNamespace(
        act=np.tanh,
        table=pandas.DataFrame({"a": [1.0]}),
        sparse=scipy.csr_matrix(np.eye(2)),
        parent=weakref.ref(Scale),
        data=[double] * 5000,
    )
    assert [site.path for site in tt.sites(model)] == ["act"]


def test_a_class_that_takes_no_tap_leaves_none_behind():
    """When a class refuses to be changed the error comes out, and what was tapped before it is as it was."""

    class Closed(type):
        def __setattr__(cls, name, value):
            raise AttributeError("closed")

    class Layer(metaclass=Closed):
        def __call__(self, x):
            return x

    model = SimpleNamespace(act=np.tanh, first=Scale(), closed=Layer())
    before = list(vars(Scale).items())
    with pytest.raises(AttributeError, match="closed"):
        tt.watch(model, to=tt.Memory())
    assert list(vars(Scale).items()) == before and model.act is np.tanh


def test_an_array_that_is_gone_when_the_step_closes(watch):
    """It is counted, and the user's code goes on."""
    model = SimpleNamespace(weight=np.ones(2), act=np.tanh)
    seen = watch(model, "weight:param", "act", strict=False)
    model.act(X)
    del model.weight
    with pytest.warns(tt.TensortapWarning, match="reading weight failed"):
        seen.tap.step()
    assert seen.places == ["act:output"] and seen.tap.counts == {"skipped_tensors": 1}


def test_a_model_of_a_framework_without_an_adapter_is_refused():
    """It is not taken for a NumPy-style object, whose taps would see nothing of it."""
    made = type("Model", (), {"__call__": lambda self, x: x, "__module__": "mlx.nn.layers"})()
    made.layer = Scale()
    with pytest.raises(tt.TensortapError, match="cannot be watched"):
        tt.watch(made, to=tt.Memory())
