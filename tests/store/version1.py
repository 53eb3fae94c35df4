"""Record the run of version 1 that lies in `fixtures/v1`, and read from a run the numbers that must never change.

    PYTHONPATH=<a checkout of version 1>/src python tests/store/version1.py tests/store/fixtures

Two ranks record in three launches. The first two are compacted into one segment, the third leaves what a closed rank
(a sealed segment) and a killed rank (tails) leave.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import tensortap as tt

COLUMNS = (
    "step", "phase", "rank", "site", "port", "slot", "call", "seq", "op", "dtype", "shape", "numel", "nan", "posinf",
    "neginf", "zeros", "min", "max", "mean", "std", "l1", "l2", "hist_offset", "hist_counts", "reason", "recomputed",
    "time", "numbers",
)  # fmt: skip
SERIES = ("std", "nan", "nonfinite", "absmax", "q0.95", "largest")
STEPS = 3
METRICS = ["step", "name", "rank", "value", "time", "text"]  # as version 1 knew them; later columns are null


def numbers_of(run: tt.Run) -> dict[str, Any]:
    """Everything version 1 reads from a run, as JSON."""
    merged = run.merged("ranks")
    return {
        "state": run.state, "ranks": run.ranks, "steps": run.steps, "last_step": run.last_step, "sites": run.sites,
        "places": [list(place) for place in run.places], "lines": run.lines, "counts": run.counts,
        "records": [_row(row) for row in run.table().select(COLUMNS).to_pylist()],
        "metrics": [_row(row) for row in run.metrics().select(METRICS).to_pylist()],
        "merged": [_row(row) for row in merged.select([c for c in COLUMNS if c in merged.column_names]).to_pylist()],
        "series": {stat: _series(run.series("0:output", stat)) for stat in SERIES},
        "tensors": [_tensor(key, array) for key, array in run.tensors()],
    }  # fmt: skip


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "time": row["time"].isoformat()} if "time" in row else row


def _series(series: Any) -> list[list[Any]]:
    """Ranks of one step follow each other in no order."""
    return sorted(map(list, zip(series.steps.tolist(), series.values.tolist(), strict=True)))


def _tensor(key: Any, array: Any) -> list[Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return [*key[:9], array.dtype.name, list(array.shape), data]


def record(path: str, *, dies: bool) -> None:
    """One rank of one launch: three steps of a small model."""
    import torch

    torch.manual_seed(int(os.environ["RANK"]))

    class Cast(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.to(torch.float32 if x.dtype == torch.bfloat16 else torch.bfloat16)

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), Cast(), Cast(), torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = [
        tt.probe("**:output", keep=[tt.stats(), tt.histogram(), tt.sample(3), tt.quantiles(0.5), largest]),
        tt.probe("1:output", keep=[tt.units()]),
        tt.probe("4:input", keep=[tt.rows([0, -1]), tt.full()], when=tt.every(2)),
        tt.probe("**:grad", "**:param", keep=[tt.stats()]),
        tt.probe("2:output", keep=[tt.stats(), tt.full()]),
        tt.probe("op:linear", keep=[tt.stats()]),
    ]
    tap = tt.watch(model, *probes, to=path, resume=True)
    for n in range(STEPS):
        x = torch.randn(5, 4)
        x[0, 0] = float("nan") if n == 1 else 0.0
        loss = model(x).nan_to_num().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tap.step(loss=loss.item(), lr=0.1)
    if dies:
        os._exit(0)
    tap.close()


def largest(x: Any) -> float:
    """A number of the user's own."""
    return float(x.abs().nan_to_num().max())


def main(folder: Path) -> None:
    path = folder / "v1"
    shutil.rmtree(path, ignore_errors=True)
    for launch, rank in itertools.product(range(3), range(2)):
        env = {**os.environ, "RANK": str(rank), "MASTER_ADDR": "localhost", "MASTER_PORT": str(29500 + launch)}
        more = ["dies"] if (launch, rank) == (2, 1) else []
        subprocess.run([sys.executable, __file__, str(path), *more], env=env, check=True)
        if (launch, rank) == (1, 1):
            tt.compact(path)
    numbers = json.dumps(numbers_of(tt.open(path))).encode()
    (folder / "v1.json.gz").write_bytes(gzip.compress(numbers, mtime=0))


if __name__ == "__main__":
    if "RANK" in os.environ:
        record(sys.argv[1], dies=len(sys.argv) > 2)
    else:
        main(Path(sys.argv[1]))
