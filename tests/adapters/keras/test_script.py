"""`tensortap run` finds the models of Keras scripts by what Keras calls training, evaluation and prediction."""

from pathlib import Path

import keras
import numpy as np
import pytest

import tensortap as tt
from tensortap.script.options import RunOptions
from tensortap.script.session import ScriptRun


@pytest.fixture
def script(tmp_path):
    """A script that has imported Keras under `tensortap run`."""
    before = {name: getattr(keras.Model, name) for name in ("fit", "evaluate", "train_on_batch")}
    run = ScriptRun(RunOptions("train.py", to=str(tmp_path / "run")))
    run.watch_keras()
    yield run
    run.finish()
    assert {name: getattr(keras.Model, name) for name in before} == before


def small(*first, name="net"):
    model = keras.Sequential([*first, keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")], name=name)
    model.compile("sgd", "mse")
    return model


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 4)).astype("float32"), rng.normal(size=(8, 1)).astype("float32")


def phases(path):
    rows = tt.open(path).table(columns=["step", "phase", "site"]).to_pylist()
    return [(row["phase"], row["site"]) for row in rows]


@pytest.mark.parametrize("first", [[], [keras.Input((4,))]], ids=["built by fit", "built before"])
def test_fit_evaluate_and_predict(script, tmp_path, first, capsys):
    """Every batch of a model is a step with its phase and its loss, whether the model is built yet or not."""
    model, (x, y) = small(*first), data()
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[keras.callbacks.History()])
    model.evaluate(x, y, batch_size=8, verbose=0)
    model.predict(x, batch_size=8, verbose=0)
    script.finish()
    expected = [(phase, site) for phase in ("train", "train", "eval", "predict") for site in ("a", "b")]
    assert phases(tmp_path / "run") == expected
    losses = [(row["name"], row["phase"]) for row in tt.open(tmp_path / "run").metrics().to_pylist()]
    assert losses == [("loss", "train")] * 2 + [("loss", "eval")]
    assert "Sequential: 4 steps" in capsys.readouterr().err


def test_batches_by_hand(script, tmp_path):
    """`train_on_batch` is seen; a model that its first batch builds, from the second on."""
    model, (x, y) = small(), data()
    for _ in range(3):
        model.train_on_batch(x, y)
    script.finish()
    assert phases(tmp_path / "run") == [("train", "a"), ("train", "b")] * 2


def test_a_second_model_has_a_run_beside_the_first(script, tmp_path, capsys):
    """Each model that is not a layer of another has its own run, and the closing lines name it."""
    x, y = data()
    for name in ("one", "two"):
        small(keras.Input((4,)), name=name).fit(x, y, batch_size=8, verbose=0)
    script.finish()
    assert phases(tmp_path / "run") == phases(Path(f"{tmp_path / 'run'}-two")) == [("train", "a"), ("train", "b")]
    said = capsys.readouterr().err
    assert "one (Sequential), two (Sequential)" in said and "run-two" in said


def test_patterns_that_choose_nothing(tmp_path, capsys):
    """A model without the sites that were asked for is trained unwatched, and the reason is said."""
    run = ScriptRun(RunOptions("train.py", sites=("conv",), to=str(tmp_path / "run")))
    run.watch_keras()
    small(keras.Input((4,))).fit(*data(), verbose=0)
    run.finish()
    assert "not watched: net:" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_a_loaded_model_is_compiled(script):
    """A model that is loaded from a file is compiled as without tensortap, and can be trained on."""
    model, (x, y) = small(keras.Input((4,))), data()
    loaded = keras.Sequential.from_config(model.get_config())
    loaded.compile_from_config(model.get_compile_config())  # as load_model does
    assert loaded.compiled
    loaded.fit(x, y, epochs=1, verbose=0)
