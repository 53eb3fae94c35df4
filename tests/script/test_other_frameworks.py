"""Scripts of other libraries under `tensortap run`: Keras, Transformers and steps compiled by JAX are recorded."""

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
JAX_TRAINING = """
from functools import partial
import jax, jax.numpy as jnp, optax

def loss_of(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["hidden"]["w"]) @ params["out"]["w"] - y) ** 2)

keys = jax.random.split(jax.random.PRNGKey(0), 3)
params = {"hidden": {"w": jax.random.normal(keys[0], (3, 8)) / 2}, "out": {"w": jax.random.normal(keys[1], (8, 1)) / 3}}
x = jax.random.normal(keys[2], (32, 3))
y = x[:, :1]
optimizer = optax.sgd(1e-7)

@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, x, y):
    loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss

opt_state = optimizer.init(params)
for _ in range(9):
    params, opt_state, loss = train_step(params, opt_state, x, y)
print(f"{loss:.5f}")
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


@pytest.mark.thorough  # tests/adapters/keras/test_script.py has it in a process that has imported Keras
def test_a_keras_script(scripts):
    """Every batch is recorded with its loss, on a backend whose layers are PyTorch modules."""
    done, run = scripts.observe(KERAS, process=True, KERAS_BACKEND="torch")
    assert done.returncode == 0, done.stderr
    rows = run.table(columns=["step", "phase", "site"]).to_pylist()
    assert [row["phase"] for row in rows if row["site"] == "classes"] == ["train"] * 3 + ["eval"]
    last = run.metrics().to_pylist()[-1]
    assert (last["phase"], f"{last['value']:.4f}") == ("eval", f"{float(done.stdout.split()[-1]):.4f}")
    assert ours(done)[-2].startswith("Sequential: 4 steps (3 train, 1 eval)")


@pytest.mark.thorough  # test_a_jax_script has the way; only the words differ
def test_a_jax_script_without_steps(scripts):
    """A script that compiles no training step is told how to show what it does."""
    done, run = scripts.observe(JAX, process=True)
    assert run is None and done.returncode == 0
    (line,) = ours(done)
    assert "tt.watch_step(step" in line


def test_a_jax_script(scripts):
    """Of a compiled step the parameters, updates, data and loss are recorded, and its optimizer is known."""
    done, run = scripts.observe(JAX_TRAINING, process=True)
    assert done.returncode == 0, done.stderr
    losses = [row["value"] for row in run.metrics().to_pylist() if row["name"] == "loss"]
    assert len(losses) == 9 and f"{losses[-1]:.5f}" == done.stdout.split()[-1]
    rows = run.table(columns=["step", "site", "port", "slot"]).to_pylist()
    assert {(r["site"], r["port"]) for r in rows if r["site"]} == {
        (name, port) for name in ("hidden.w", "out.w") for port in ("param", "update")
    }
    assert {r["slot"] for r in rows if r["port"] == "input"} == {".x", ".y"}
    assert {r["step"] for r in rows if r["port"] == "update"} >= {0, 1, 2, 4, 8}
    made = next(row for row in run.events().to_pylist() if row["kind"] == "optimizer")
    assert made["name"] == "sgd" and made["code"].endswith(":12")
    found = run.findings()
    assert [f.rule for f in found.at_least("warning")] == ["learning_rate_low"]
    assert "cannot be seen" in found.skipped["loss_broadcast"] and "cannot be seen" in found.skipped["dropout_high"]
