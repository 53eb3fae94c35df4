"""An object that cannot be watched gets an answer that says what to do."""

from __future__ import annotations

import numpy as np
import pytest

import tensortap as tt

ASK = {"watch": lambda value: tt.watch(value, to=tt.Memory()), "sites": tt.sites}


@pytest.mark.parametrize("ask", ASK)
def test_parameters(ask):
    """Nested parameters of JAX: watch the step, and how its sites are seen."""
    jnp = pytest.importorskip("jax.numpy")
    for params in ({"layer": {"w": jnp.ones(2)}}, [jnp.ones(2)], {"w": np.ones(2)}):
        with pytest.raises(tt.TensortapError, match=r"watch_step\(step, params\).*step\.tap\.run\.sites"):
            ASK[ask](params)


@pytest.mark.parametrize("ask", ASK)
def test_haiku(ask):
    """A transformed function is no module: the step that calls it is watched."""
    hk = pytest.importorskip("haiku")
    for transform in (hk.transform, hk.transform_with_state):
        with pytest.raises(tt.TensortapError, match=r"pair of functions.*watch_step\(step, params\)"):
            ASK[ask](transform(lambda x: hk.Linear(2)(x)))


@pytest.mark.parametrize("ask", ASK)
def test_tensorflow(ask, tmp_path):
    """A SavedModel has no layers, and other objects of TensorFlow are no Keras models."""
    tf = pytest.importorskip("tensorflow")

    class Net(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, 2))])
        def serve(self, x):
            return x + 1.0

    net = Net()
    tf.saved_model.save(net, str(tmp_path / "saved"))
    with pytest.raises(tt.TensortapError, match=r"SavedModel.*load_model.*TFSMLayer"):
        ASK[ask](tf.saved_model.load(str(tmp_path / "saved")))
    for value in (net, net.serve):
        with pytest.raises(tt.TensortapError, match=r"only Keras models are watched.*tensortap\.tap"):
            ASK[ask](value)


@pytest.mark.parametrize("ask", ASK)
def test_tensorflow_beside_torch(ask):
    """A compiled function of TensorFlow is not taken for one of PyTorch, where that is imported too."""
    pytest.importorskip("torch")
    tf = pytest.importorskip("tensorflow")
    with pytest.raises(tt.TensortapError, match=r"only Keras models are watched.*tensortap\.tap"):
        ASK[ask](tf.function(lambda x: x + 1.0))


@pytest.mark.parametrize("ask", ASK)
def test_onnx(ask):
    """A model that is not running yet: the session is watched."""
    onnx = pytest.importorskip("onnx")
    with pytest.raises(tt.TensortapError, match=r"InferenceSession.*tensortap\.watch\(session\)"):
        ASK[ask](onnx.ModelProto())
