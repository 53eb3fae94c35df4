"""The reducer `units()`: how active each unit was."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import ProbeError


@pytest.mark.parametrize(
    ("shape", "axis"), [((7,), 0), ((6, 5), 1), ((2, 3, 5), 2), ((2, 5, 4, 3), 1), ((2, 5, 2, 3, 4), 1)]
)
def test_units_against_a_loop(shape: tuple[int, ...], axis: int) -> None:
    """Each unit's share of non-zeros and mean magnitude are those of its own elements."""
    array = np.random.default_rng(0).normal(size=shape) * (np.random.default_rng(1).random(shape) > 0.4)
    got = tt.units().pick(array, "")
    assert got.dtype == np.float32
    assert got.shape == (2, shape[axis])
    for unit in range(shape[axis]):
        own = np.take(array, unit, axis)
        assert got[:, unit] == pytest.approx([(own != 0).mean(), np.abs(own).mean()], rel=1e-6)


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.uint8, np.bool_, np.complex64]
)
def test_units_of_every_type(dtype: type) -> None:
    """Small types are summed without overflow, and no sign is lost."""
    array = np.full((2000, 2), 100 if dtype != np.int8 else -128).astype(dtype)
    array[:, 1] = 0
    size = float(np.abs(array[0, 0].astype(np.complex64 if dtype == np.complex64 else np.float32)))
    assert tt.units().pick(array, "").tolist() == [[1.0, 0.0], [pytest.approx(size), 0.0]]


def test_units_of_nothing() -> None:
    """A scalar and an empty tensor have no units; NaN counts as active and stays visible."""
    assert tt.units().pick(np.float32(3.0).reshape(()), "") is None
    assert tt.units().pick(np.zeros((0, 4)), "") is None
    assert np.isnan(tt.units().pick(np.array([[np.nan]]), "")[1, 0])


def test_units_are_kept_and_read_back(tmp_path: Path) -> None:
    """They are found in the run under their kind."""
    with tt.watch(tt.probe("x", keep=tt.units()), to=tmp_path / "run") as tap:
        tt.tap(np.array([[0.0, 1.0], [0.0, 3.0]], np.float32), "x")
        tap.step()
    assert tap.run.tensor("x", 0, kind="units").tolist() == [[0.0, 1.0], [0.0, 2.0]]
    with pytest.raises(ProbeError, match=r"units\(\)"):
        tt.probe("x", keep=tt.units)
