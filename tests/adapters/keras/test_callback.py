"""The callback for Keras."""

from __future__ import annotations

import numpy as np
import pytest
from rounding import assert_same_to_rounding

import tensortap as tt
from tensortap.integrations.keras import Watch


def test_fit_with_validation(make, fit, bare_weights, data, tmp_path):
    """Training and validation steps go into one run, and the taps are off afterwards."""
    model = make()
    watching = Watch("last", to=tmp_path / "run")
    fit(model, epochs=2, callbacks=[watching], validation_data=data, validation_batch_size=40)
    run = tt.open(tmp_path / "run")
    phases = dict(run.table(columns=["step", "phase"]).to_pandas().itertuples(index=False))
    assert [phases[step] for step in run.steps] == (["train"] * 3 + ["eval"]) * 2
    assert "tensortap" not in type(model.train_function).__module__
    assert_same_to_rounding(bare_weights(epochs=2), model.get_weights())


def test_a_second_fit_goes_on_with_the_run(make, fit, tmp_path):
    """The count of steps does not begin again."""
    model, watching = make(), Watch("last", to=tmp_path / "run")
    fit(model, callbacks=[watching])
    fit(model, callbacks=[watching])
    assert tt.open(tmp_path / "run").steps == list(range(6))


def test_an_error_in_fit(make, fit, memory):
    """Where `fit` fails the callback is closed by hand, or by the next `fit`."""
    model, watching = make(), Watch("last", to=memory)
    with pytest.raises(Exception):  # noqa: B017
        model.fit(np.ones((4, 5), np.float32), np.ones((4, 1), np.float32), callbacks=[watching], verbose=0)
    fit(model, callbacks=[watching])
    assert {record["phase"] for record in memory.records} == {"train"}
    assert not [name for name in vars(model) if type(vars(model)[name]).__module__.startswith("tensortap")]
