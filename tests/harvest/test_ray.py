"""Harvesting on Ray: the same bytes as here, with a worker killed on the way."""

from __future__ import annotations

import builtins
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harvest.subjects import contents
from torch import nn
from torch.utils.data import DataLoader

import tensortap as tt
from tensortap.errors import HarvestError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Ray's own: sockets, forks, and what it will change
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One real Ray on this machine, for all tests of this file."""
    import ray

    tests = str(Path(__file__).resolve().parent.parent)
    # In the environment that workers inherit: those that Ray starts in advance can be used then.
    variables = {
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled", "RAY_enable_metrics_collection": "0",
        "RAY_worker_niceness": "0",  # by default 15: beside other tests they would wait for minutes
    }  # fmt: skip
    handler, printing = signal.getsignal(signal.SIGTERM), builtins.print
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield ray
        ray.shutdown()
    signal.signal(signal.SIGTERM, handler)  # Ray leaves its own in the process, and its own print()
    builtins.print = printing


class Once(nn.Module):
    """Kills its worker the first time that it is given a certain sample; raises on another."""

    def __init__(self, mark: str) -> None:
        super().__init__()
        self.mark = mark

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 13).any() and not os.path.exists(self.mark):  # noqa: PTH110
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if (x == 5).any():
            raise ValueError("five")
        return x * 2


def test_ray_gives_the_same_bytes(ray: Any, tmp_path: Path) -> None:
    """A killed worker's part is done again, a bad sample is set aside, and the shards are those of one process."""
    rows = [{"x": np.array([i], np.float32)} for i in range(24)]
    options: dict[str, Any] = {"batch_size": 2, "shard_size": 100, "spread": 1, "progress": False}
    model = Once(str(tmp_path / "mark"))
    data = ray.data.from_items([{"x": [float(i)]} for i in range(24)])
    acts = tt.harvest(model, data, ":output", to=tmp_path / "ray", engine=tt.Ray(workers=2), dtype="f32", **options)
    assert (tmp_path / "mark").exists()
    assert [each["sample"] for each in acts.set_aside] == [5]
    tt.harvest(model, rows, ":output", to=tmp_path / "local", dtype="f32", **options)
    assert contents(tmp_path / "ray" / "data") == contents(tmp_path / "local" / "data")
    shuffled = [row["sample"] for row in acts.to_ray(shuffle=True, seed=1).take_all()]
    assert sorted(shuffled) == [i for i in range(24) if i != 5]
    assert shuffled != sorted(shuffled)


class Failing(nn.Module):
    """Raises on every sample of a batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.min() >= 4:
            raise ValueError("bad weights")
        return x


def test_ray_passes_on_why_a_worker_failed(ray: Any, tmp_path: Path) -> None:
    """What ends a worker is said as it would be said here, not in Ray's words."""
    data = list(np.arange(8, dtype=np.float32).reshape(-1, 1))
    with pytest.raises(
        HarvestError, match=r"^the model raised on the batch of samples (4 to 5|6 to 7): ValueError: bad weights"
    ):
        tt.harvest(Failing(), data, ":output", to=tmp_path / "acts", batch_size=2, shard_size=8, spread=1,
                   engine=tt.Ray(workers=1), progress=False)  # fmt: skip


def test_ray_refuses_what_cannot_be_sent_before_anything_is_removed(ray: Any, tmp_path: Path) -> None:
    """Batches that come only once cannot be sent to workers: the error says what to give, and the harvest stays."""
    acts, options = tmp_path / "acts", {"overwrite": True, "progress": False}
    tt.harvest(nn.Identity(), [torch.ones(2, 3)], ":output", to=acts, **options)  # type: ignore[arg-type]
    before = contents(acts)
    once = (torch.ones(2, 3) for _ in range(2))
    with pytest.raises(HarvestError, match="give functions that return them"):
        tt.harvest(nn.Identity(), once, ":output", to=acts, engine=tt.Ray(), **options)  # type: ignore[arg-type]
    assert contents(acts) == before


def unseeded() -> nn.Module:
    torch.seed()
    return nn.Linear(1, 2)


def shuffled() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.rand(64, 1, generator=torch.Generator().manual_seed(0)), batch_size=8, shuffle=True)


@pytest.mark.parametrize("what", ["model", "data"])
def test_ray_refuses_workers_that_differ(ray: Any, what: str, tmp_path: Path) -> None:
    """Factories that give each worker other weights or another order would mix rows of several models or orders."""
    model, data = (unseeded, list(np.ones((64, 1), np.float32))) if what == "model" else (nn.Identity(), shuffled)
    said = rf"^every worker must have the same {what}: its fingerprint is \w+ in the driver and \w+ on a worker\."
    with pytest.raises(HarvestError, match=said):
        tt.harvest(model, data, ":output", to=tmp_path / "acts", engine=tt.Ray(workers=1), progress=False)
    assert tt.open_harvest(tmp_path / "acts").rows == 0
