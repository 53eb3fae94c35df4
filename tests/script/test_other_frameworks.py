"""Scripts of other libraries under `tensortap run`: Keras and Transformers are recorded, JAX gets a word that helps."""

import pytest
from tests.script.conftest import ours

KERAS = """
import keras, numpy as np
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(8, "relu", name="hidden"),
                          keras.layers.Dense(3, "softmax", name="classes")])
model.compile("adam", "sparse_categorical_crossentropy")
images, labels = np.random.rand(24, 6, 6).astype("float32"), np.random.randint(0, 3, 24)
model.fit(images, labels, batch_size=8, epochs=1, verbose=0)
print(model.evaluate(images, labels, batch_size=24, verbose=0))
"""
JAX = """
import jax, jax.numpy as jnp
step = jax.jit(jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).sum()))
print(step(jnp.ones((3, 2)), jnp.ones((4, 3)))[0])
"""
TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
shape = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = BertForSequenceClassification(BertConfig(**shape))
data = [{"input_ids": torch.randint(0, 50, (6,)), "labels": torch.tensor(i % 2)} for i in range(8)]
args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=3, report_to=[], use_cpu=True,
                         save_strategy="no", disable_tqdm=True, eval_strategy="steps", eval_steps=2)
Trainer(model, args, train_dataset=data, eval_dataset=data).train()
"""


def test_a_trainer_of_transformers(scripts):
    """Hugging Face's Trainer, which trains by accelerate: steps count as its optimizer's, evaluation apart."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    done, run = scripts.observe(TRAINER, process=True)
    assert done.returncode == 0, done.stderr
    rows = run.table(columns=["step", "phase"]).to_pylist()
    assert {(row["phase"], row["step"]) for row in rows} == {
        *(("train", n) for n in range(3)),
        ("eval", 0),
        ("eval", 1),
    }
    assert [(row["name"], row["step"]) for row in run.metrics().to_pylist()] == [("loss", n) for n in range(3)]
    assert run.info["model"]["class"] == "BertForSequenceClassification"


def test_a_keras_script(scripts):
    """Every batch is recorded with its loss, on a backend whose layers are PyTorch modules."""
    done, run = scripts.observe(KERAS, process=True, KERAS_BACKEND="torch")
    assert done.returncode == 0, done.stderr
    rows = run.table(columns=["step", "phase", "site"]).to_pylist()
    assert [row["phase"] for row in rows if row["site"] == "classes"] == ["train"] * 3 + ["eval"]
    last = run.metrics().to_pylist()[-1]
    assert (last["phase"], f"{last['value']:.4f}") == ("eval", f"{float(done.stdout.split()[-1]):.4f}")
    assert ours(done)[-2].startswith("Sequential: 4 steps (3 train, 1 eval)")


def test_a_jax_script(scripts):
    """A script whose steps are compiled whole is told how to show them."""
    done, run = scripts.observe(JAX, process=True)
    assert run is None and done.returncode == 0
    (line,) = ours(done)
    assert "tt.watch_step(step" in line
