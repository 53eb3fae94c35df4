"""Send records to MLflow as metrics."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from tensortap.errors import ProbeError, needs
from tensortap.record.counters import TensortapWarning
from tensortap.sinks.numbers import STATS
from tensortap.sinks.tracker import Tracker, TrackerRow, plain_row

_PREFIX: Final = "tensortap/"
_MOST: Final = 1000  # metrics that MLflow takes at once
_LONGEST: Final = 250
_ALLOW_FILES: Final = "MLFLOW_ALLOW_FILE_STORE"
_TO_FILES: Final = (
    "MLflow's default store is a database, which mlflow-skinny cannot open: the run is written to the folder mlruns. "
    "To look at it: MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri mlruns. Choose a store yourself with "
    "tt.MLflow(uri=...) or MLFLOW_TRACKING_URI"
)
_NOT_ALLOWED: Final = re.compile(r"[^\w. :/-]")


class MLflow(Tracker):
    """Log to the run that is active, or to one of its own that ends with the tap.

    >>> import tensortap as tt
    >>> tt.watch(model, to=["runs/exp1", tt.MLflow()])                              # doctest: +SKIP
    >>> tt.watch(model, to=tt.MLflow(experiment="layers", uri="http://mlflow:5000"))  # doctest: +SKIP

    Metrics are called `tensortap/blocks.3.mlp/output/std`, with the tap's step numbers; what MLflow does not take in a
    name becomes `_`. MLflow has no histograms. NaN and infinities are counted in `…/nonfinite`.
    """

    def __init__(
        self, run_id: str | None = None, *, experiment: str | None = None, uri: str | None = None,
        stats: Iterable[str] = STATS,
    ) -> None:  # fmt: skip
        super().__init__(stats=stats, histograms=False)
        with needs("MLflow(…)", "tensortap[mlflow]"):
            import mlflow
        self._mlflow = mlflow
        self._client = self._opened(uri)
        active = None if run_id or experiment or uri else self._mlflow.active_run()
        self._own = run_id is None and active is None
        self.run_id: str = run_id or (active.info.run_id if active else self._new_run(experiment))

    def send(self, row: TrackerRow) -> None:
        """Log a row, a thousand metrics at a time, with the user's own if the run is ours."""
        named = plain_row(row, _PREFIX) | (row.metrics if self._own else {})
        metric = self._mlflow.entities.Metric
        logged = [metric(_allowed_name(name), value, row.time // 1000, row.step) for name, value in named.items()]
        for some in _batches(logged):
            self._client.log_batch(self.run_id, metrics=some)

    def end(self) -> None:
        """End the run if it is ours."""
        if self._own:
            self._client.set_terminated(self.run_id)

    def _opened(self, uri: str | None) -> Any:
        """Return a client whose store could be opened; files where nobody chose a store and the default cannot be."""
        try:
            return self._mlflow.MlflowClient(tracking_uri=uri)
        except Exception as error:
            if uri is None and not self._mlflow.tracking.is_tracking_uri_set():
                return self._files()
            raise ProbeError(
                f"MLflow cannot open the store {uri or self._mlflow.get_tracking_uri()!r}: {error}. Name another: "
                "MLflow(uri='http://mlflow:5000'); a database needs the package mlflow rather than mlflow-skinny"
            ) from error

    def _files(self) -> Any:
        """Return a client of the folder `mlruns`: MLflow's default is a database, which mlflow-skinny cannot open."""
        warnings.warn(_TO_FILES, TensortapWarning, stacklevel=5)
        before = os.environ.get(_ALLOW_FILES)
        os.environ[_ALLOW_FILES] = "true"  # MLflow asks when it opens the store
        try:
            return self._mlflow.MlflowClient(tracking_uri=Path("mlruns").absolute().as_uri())
        finally:
            if before is None:
                del os.environ[_ALLOW_FILES]
            else:
                os.environ[_ALLOW_FILES] = before

    def __str__(self) -> str:
        return f"MLflow run {self.run_id}"

    def _new_run(self, experiment: str | None) -> str:
        name = experiment or "tensortap"
        found = self._client.get_experiment_by_name(name)
        number = found.experiment_id if found else self._client.create_experiment(name)
        return str(self._client.create_run(number).info.run_id)


def _allowed_name(name: str) -> str:
    return _NOT_ALLOWED.sub("_", name)[-_LONGEST:]


def _batches(items: list[Any]) -> Iterator[list[Any]]:
    return (items[i : i + _MOST] for i in range(0, len(items), _MOST))
