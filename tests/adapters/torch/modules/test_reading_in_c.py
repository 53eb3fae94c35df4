"""Tensors that C reads by DLPack's exchange API give the rows that Python's way gives."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.modules.tensors import HOOK_VARIABLE, TensorObserver
from tensortap.record.recorder import Recorder
from tensortap.reduce.statistics import COLUMNS

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this PyTorch has no C exchange API"
)
COMPARED = tuple(name for name in COLUMNS if name not in ("time", "hist_counts"))


class Odd(nn.Module):
    """Returns one tensor of each kind that has a row, and some that Python must look at."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Make them of x."""
        plain = [x, x.bfloat16(), x.half(), x.double(), x > 0, (x * 100).to(torch.int8), (x * 100).long(), x + 1j * x]
        small = [x.to(kind) for kind in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz)]
        views = [x.T, x[:, ::2], x[:0], x[0, 0], x[:, :1], x[1:], x.expand(3, *x.shape), (x + 1j * x).conj().imag]
        return [*plain, *small, *views, x.to_sparse()]


def record(folder: Path) -> None:
    """Record training steps, and odd tensors, as two runs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ports = ["*", "*:input", "*:grad_output", "**:param", "**:grad", "**:update"]
    with tt.watch(model, *ports, to=folder / "trained"):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 8)).square().sum().backward()
            optimizer.step()
    with tt.watch(odd := Odd(), "", to=folder / "odd") as watching:
        odd(torch.randn(6, 10))
        watching.step()


def rows(folder: Path) -> list[list[str]]:
    """Every row in order, as text: NaN equals NaN."""
    table = tt.open_run(folder).table().sort_by([("step", "ascending"), ("seq", "ascending")]).to_pylist()
    return [[str(row[name]) for name in (*COMPARED, "hist_counts")] for row in table]


def test_both_ways_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, inputs, gradients, parameters, updates and odd tensors: the same bits, in the same order."""
    for way in ("c", "python"):
        monkeypatch.setenv(HOOK_VARIABLE, way)
        record(tmp_path / way)
    for run in ("trained", "odd"):
        ours, theirs = rows(tmp_path / "c" / run), rows(tmp_path / "python" / run)
        assert len(ours) > 15 and ours == theirs


def test_c_is_used_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is, unless the variable says otherwise."""
    assert TensorObserver(Recorder([])).reads_in_c
    monkeypatch.setenv(HOOK_VARIABLE, "python")
    assert not TensorObserver(Recorder([])).reads_in_c


def test_batched_tensors_are_left_to_python() -> None:
    """A tensor inside vmap has no memory of its own; nothing crashes, and the result is right."""
    model = nn.Linear(4, 2)
    x = torch.randn(3, 5, 4)
    with tt.watch(model, to=[]):
        out = torch.vmap(model)(x)
    assert torch.equal(out, torch.stack([model(part) for part in x])) or torch.allclose(out, model(x))


def test_threads_share_a_model(tmp_path: Path) -> None:
    """Several threads that call one watched model record every call, once."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def call() -> None:
        with torch.no_grad():
            for _ in range(50):
                model[0](torch.randn(3, 16))

    with tt.watch(model, "0", to=tmp_path / "run") as watching:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        watching.step()
    assert len(tt.open_run(tmp_path / "run").table()) == 150


def test_copies_of_a_watched_model_work() -> None:
    """A deep copy made under a tap computes the same, unwatched."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.randn(2, 4)
    with tt.watch(model, to=[]):
        other = copy.deepcopy(model)
    assert np.array_equal(other(x).detach().numpy(), model(x).detach().numpy())
