"""The user's metrics for rules: a series for each name, of training where a name has both phases."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tensortap.store import queries
from tensortap.store.snapshot import Snapshot

Floats = npt.NDArray[np.float64]


class MetricHistory(dict[str, tuple[npt.NDArray[np.int64], Floats]]):
    """Steps and values by name, ranks averaged. `of_evaluation`: names that evaluation alone gave."""

    def __init__(self, snapshot: Snapshot) -> None:
        rows = _rows_by_name(snapshot)
        for name, columns in rows.items():
            trained = columns["phase"] == "train"
            chosen = trained if trained.any() else np.ones(len(trained), bool)
            self[name] = _mean_by_step(columns["step"][chosen], columns["value"][chosen])
        phases = {name: set(columns["phase"]) for name, columns in rows.items()}
        trains = any("train" in found for found in phases.values())
        self.of_evaluation = {name for name, found in phases.items() if trains and found == {"eval"}}


def _rows_by_name(snapshot: Snapshot) -> dict[str, dict[str, npt.NDArray[Any]]]:
    table = queries.metrics(snapshot)
    table = table.filter(table["value"].is_valid())  # labels have none
    columns = {name: table[name].to_numpy(zero_copy_only=False) for name in ("name", "phase", "step", "value")}
    names = columns["name"]
    return {name: {key: values[names == name] for key, values in columns.items()} for name in dict.fromkeys(names)}


def _mean_by_step(steps: npt.NDArray[np.int64], values: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
    unique, index = np.unique(steps, return_inverse=True)
    with np.errstate(invalid="ignore"):
        return unique, np.bincount(index, values) / np.bincount(index)
