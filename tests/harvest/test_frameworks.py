"""Harvests of models of other frameworks, by the same call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import HarvestError

ROWS = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)


def values(acts: tt.Harvest) -> np.ndarray:
    """The rows in the order of the samples."""
    (batch,) = acts.batches(100)
    assert sorted(batch.sample.tolist()) == list(range(12))
    return batch.values[np.argsort(batch.sample)]


def harvest(model: Any, to: Path, site: str) -> tt.Harvest:
    return tt.harvest(model, list(ROWS), site, to=to, batch_size=5, progress=False)


def test_onnx(tmp_path: Path) -> None:
    """A session of ONNX Runtime."""
    ort, onnx = pytest.importorskip("onnxruntime"), pytest.importorskip("onnx")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"], name="act")],
        "g", [helper.make_tensor_value_info("x", kind, [None, 4])],
        [helper.make_tensor_value_info("y", kind, [None, 3])], [onnx.numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    session = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    site = next(site.path for site in tt.sites(session) if "act" in site.path or "Relu" in site.types)
    assert np.array_equal(values(harvest(session, tmp_path / "acts", site)), session.run(None, {"x": ROWS})[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own, of NumPy
def test_keras(tmp_path: Path) -> None:
    """A Keras model."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="first"), keras.layers.ReLU(name="act")])
    got = values(harvest(model, tmp_path / "acts", "first:output"))
    layer = model.get_layer("first")
    want = ROWS @ np.asarray(keras.ops.convert_to_numpy(layer.kernel)) + keras.ops.convert_to_numpy(layer.bias)
    assert np.allclose(got, want, atol=1e-5)
    weights = [np.ones_like(each) for each in model.get_weights()]
    model.set_weights(weights)
    with pytest.raises(tt.TensortapError, match="fingerprint of the model"):
        harvest(model, tmp_path / "acts", "first:output")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own, of NumPy
@pytest.mark.parametrize("by_name", [True, False], ids=["inputs in a dict", "inputs in a list"])
def test_keras_inputs_by_name(tmp_path: Path, by_name: bool) -> None:
    """A functional Keras model takes its inputs from batches that are dicts, and leaves labels in them."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    sum_of = keras.layers.Add(name="sum")([a, b])
    model = keras.Model({"a": a, "b": b} if by_name else [a, b], keras.layers.Dense(2, name="head")(sum_of))
    batch = {"b": 2 * ROWS, "a": ROWS, "labels": np.zeros(len(ROWS), np.int64)}
    acts = tt.harvest(model, [batch], "sum:output", to=tmp_path / "acts", progress=False)
    assert np.allclose(values(acts), 3 * ROWS, atol=1e-6)
    captured = tt.capture(model, {"b": 2 * ROWS, "a": ROWS}, "sum:output")
    assert np.allclose(np.asarray(captured["sum"]), 3 * ROWS, atol=1e-6)


def test_numpy(tmp_path: Path) -> None:
    """A NumPy-style model of objects with __call__."""

    class Layer:
        def __init__(self, width: int) -> None:
            self.weight = np.full((4, width), 0.5, np.float32)

        def __call__(self, x: np.ndarray) -> np.ndarray:
            return x @ self.weight

    class Model:
        def __init__(self) -> None:
            self.first, self.second = Layer(4), Layer(2)

        def __call__(self, x: np.ndarray) -> np.ndarray:
            return self.second(self.first(x))

    model = Model()
    assert np.array_equal(values(harvest(model, tmp_path / "acts", "first")), model.first(ROWS))
    model.second.weight[0] = 0.0
    with pytest.raises(tt.TensortapError, match="fingerprint of the model"):
        harvest(model, tmp_path / "acts", "first")


def test_jax(tmp_path: Path) -> None:
    """A model of Equinox, by JAX's adapter."""
    eqx, jax = pytest.importorskip("equinox"), pytest.importorskip("jax")
    model = eqx.nn.Sequential([eqx.nn.Linear(4, 3, key=jax.random.key(0)), eqx.nn.Lambda(jax.nn.relu)])

    class Batched(eqx.Module):
        inner: Any

        def __call__(self, x: Any) -> Any:
            return jax.vmap(self.inner)(x)

    acts = harvest(Batched(model), tmp_path / "acts", "**:output")
    want = np.asarray(jax.vmap(model.layers[0])(ROWS))
    sites = [site for site in acts.sites if "layers" in site and acts.site(site).width == 3]
    found = [next(acts.batches(100, site)) for site in sites]
    assert any(np.allclose(batch.values[np.argsort(batch.sample)], want, atol=1e-6) for batch in found)


@pytest.mark.parametrize("kind", ["loader", "dataset", "parquet", "hf"])
def test_data_of_all_kinds(kind: str, tmp_path: Path) -> None:
    """A DataLoader, a Dataset, Parquet files and an HF dataset give the same rows."""
    import torch

    model = torch.nn.Identity()
    options: dict[str, Any] = {"to": tmp_path / "acts", "progress": False, "dtype": "f32"}
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(ROWS))
    if kind == "loader":
        acts = tt.harvest(model, torch.utils.data.DataLoader(tensors, batch_size=5), ":output", **options)
    elif kind == "dataset":
        acts = tt.harvest(model, tensors, ":output", batch_size=5, **options)
    else:
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        rows = datasets.Dataset.from_dict({"input": ROWS.tolist(), "text": ["…"] * 12})
        if kind == "parquet":
            rows.to_parquet(str(tmp_path / "rows.parquet"))
        data = rows if kind == "hf" else str(tmp_path / "*.parquet")
        acts = tt.harvest(model, data, ":output", batch_size=5, **options)
    assert np.array_equal(values(acts), ROWS)


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_model(tmp_path: Path) -> None:
    """Of a tokenized data set, an HF model is given what it takes, and padding is left out."""
    import torch

    transformers = pytest.importorskip("transformers")

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=40, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).eval()
    data = [
        {"input_ids": list(range(3 + i)), "attention_mask": [1] * (3 + i), "labels": [0], "text": "…"} for i in range(6)
    ]
    keep = tt.tokens(mask="attention_mask")
    options: dict[str, Any] = {"keep": keep, "batch_size": 2, "progress": False}
    acts = tt.harvest(model, data, "transformer.h.0:output", to=tmp_path / "acts", **options)
    with torch.no_grad():
        ids = torch.tensor([data[5]["input_ids"]])
        want = model(ids, output_hidden_states=True).hidden_states[1][0].numpy()
    site = acts.sites[0]
    (batch,) = acts.batches(100, site)
    mine = batch.sample == 5
    assert np.allclose(batch.values[mine][np.argsort(batch.position[mine])], want, atol=1e-5)
    assert len(batch) == sum(3 + i for i in range(6))


def test_a_flax_model_with_keys_of_random_numbers(tmp_path: Path) -> None:
    """The state of random numbers in a module of Flax NNX tells models apart, though it is no NumPy array."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, seed: int) -> None:
            rngs = nnx.Rngs(params=0, dropout=seed)
            self.fc, self.drop = nnx.Linear(4, 3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.fc(x))

    def harvested(seed: int) -> tt.Harvest:
        model = Net(seed)
        model.eval()
        return tt.harvest(model, [x], "fc", to=tmp_path / "acts", progress=False)

    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    (batch,) = harvested(1).batches(9, seed=None)
    assert np.array_equal(batch.values[np.argsort(batch.sample)], np.asarray(Net(1).fc(x)))
    assert harvested(1).rows == 2
    with pytest.raises(HarvestError, match="another model"):
        harvested(2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own, of NumPy
def test_a_dataset_of_keras(tmp_path: Path) -> None:
    """The items of a PyDataset are batches, of which `inputs` chooses the input."""
    keras = pytest.importorskip("keras")

    class Batches(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
            return ROWS[number * 4 : number * 4 + 4], np.zeros(4)

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3, name="fc")])
    acts = tt.harvest(model, Batches(), "fc", to=tmp_path / "acts", inputs=0, progress=False)
    assert np.allclose(values(acts), ROWS @ np.asarray(model.layers[0].get_weights()[0]), atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Keras's own, of NumPy
def test_a_keras_model_that_is_made_again(tmp_path: Path) -> None:
    """Keras counts up names and draws seeds: a model made again is the same, one with another activation is not."""
    keras = pytest.importorskip("keras")

    def model(activation: str) -> Any:
        made = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(3, activation), keras.layers.Dropout(0.5)]
        )
        made.set_weights([np.ones((4, 3)), np.zeros(3)])
        return made

    first = harvest(model("relu"), tmp_path / "acts", ":output")
    assert harvest(model("relu"), tmp_path / "acts", ":output").plan == first.plan
    with pytest.raises(HarvestError, match="another model"):
        harvest(model("tanh"), tmp_path / "acts", ":output")
