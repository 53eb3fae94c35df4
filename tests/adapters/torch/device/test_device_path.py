"""The way of a device's rows through a step: places at once, values later, and nobody waits who need not.

CPU tensors are sent that way, with PyTorch's own operations and streams that can be held up.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tensortap as tt
from tensortap.adapters.torch import metrics
from tensortap.adapters.torch.device import operations as device_ops
from tensortap.adapters.torch.device.streams import HostStream
from tensortap.adapters.torch.modules import tensors
from tensortap.errors import NonFiniteError, ProbeError

SUMS = ("mean", "std", "l1", "l2", "skewness", "kurtosis")


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model: nn.Module, tap: tt.Tap | None = None, steps: int = 3) -> None:
    """A few steps of the same training every time."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        if tap is not None:
            tap.step()


class Held(HostStream):
    """A device that finishes nothing before it is let go, and notes who waits for it."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self.waiting: list[str] = []
        self.copies = 0

    def host_memory(self, like: Tensor) -> Tensor:
        self.copies += 1
        return super().host_memory(like)

    def record_event(self) -> Callable[[], None]:
        def wait() -> None:
            self.waiting.append(threading.current_thread().name)
            assert self.finished.wait(60)

        return wait


def hold(seen: Any, stream: HostStream) -> None:
    seen.tap._adapter._observer.devices._streams = lambda device: stream


# --- the same run -------------------------------------------------------------------------------


def everything() -> list[Any]:
    def peak(x: Tensor) -> Tensor:
        return x.abs().max()

    def ends(x: Tensor) -> dict[str, Tensor]:
        return {"low": x.min(), "high": x.max()}

    def first(x: Tensor) -> Tensor:
        return x.flatten()[:3]

    keep = [tt.histogram(), tt.hash(), tt.quantiles(0.1, 0.5), tt.sample(4), tt.rows([0, 9]), tt.full(), tt.units()]
    return [
        tt.probe("{0,1,2}:{output,input,grad_output}", keep=keep),
        tt.probe("**:{param,grad,update}", keep=[tt.stats(), tt.hash(), peak, ends, first]),
    ]


def recorded(path: Any, monkeypatch: pytest.MonkeyPatch, way: str) -> tt.Run:
    monkeypatch.setenv("TENSORTAP_DEVICE_PATH", way)
    torch.manual_seed(0)
    model = net()
    with tt.watch(model, *everything(), to=path, strict=True) as tap:
        train(model, tap)
    return tt.open(path)


def test_a_run_by_the_device_path_is_the_run_by_the_kernel(tmp_path, monkeypatch):
    """Places, counts, ends, histograms and kept elements are equal; sums and what follows from them to rounding."""
    ours, theirs = (recorded(tmp_path / way, monkeypatch, way) for way in ("", "torch"))
    order = ["step", "seq"]
    want, got = (run.table().to_pandas().sort_values(order).reset_index(drop=True) for run in (ours, theirs))
    assert len(want) == len(got) > 60
    for name in want.columns.difference([*SUMS, "time", "numbers"]):
        assert want[name].map(str).tolist() == got[name].map(str).tolist(), name
    for name in SUMS:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6)
    for a, b in zip(want["numbers"], got["numbers"], strict=True):
        assert [key for key, _ in a or ()] == [key for key, _ in b or ()]
        np.testing.assert_allclose([v for _, v in b or ()], [v for _, v in a or ()], rtol=1e-5, atol=1e-6)
    for site, kind in (("0", "sample"), ("1", "rows"), ("2", "full"), ("1", "units"), ("0.weight:param", "first")):
        for step in range(3):
            expected = ours.tensor(site, step=step, kind=kind)
            np.testing.assert_allclose(theirs.tensor(site, step=step, kind=kind), expected, rtol=1e-6)
    assert not theirs.counts


def test_training_is_unchanged(device_path):
    """The same bits with and without taps."""
    assert tt.verify(net(), torch.randn(4, 3))


# --- nobody waits -------------------------------------------------------------------------------

WAITS = {
    "_local_scalar_dense", "item", "nonzero", "nonzero_numpy", "equal", "is_nonzero", "masked_select", "unique_dim",
    "_unique", "_unique2", "unique_consecutive", "bincount", "argwhere", "repeat_interleave", "tolist", "numpy",
    "cpu", "__bool__", "__int__", "__float__", "__index__", "allclose", "histc", "__contains__",
}  # fmt: skip


class Landed(HostStream):
    """A device whose landings, the host's memory, can be told from its own."""

    def __init__(self) -> None:
        self.host: set[int] = set()

    def host_memory(self, like: Tensor) -> Tensor:
        host = super().host_memory(like)
        self.host.add(host.data_ptr())
        return host


class Guard:
    """Notes what would wait for the device, if the tensors were on one."""

    def __init__(self, stream: Landed) -> None:
        self.found: list[str] = []
        self._stream = stream

    def look(self, name: str, args: Any, kwargs: Any) -> None:
        if self._copies(name, args, kwargs) or self._masks(name, args) or self._reads(name, args):
            self.found.append(name)

    def _reads(self, name: str, args: Any) -> bool:
        return name in WAITS and not (isinstance(args[0], Tensor) and args[0].data_ptr() in self._stream.host)

    def _copies(self, name: str, args: Any, kwargs: Any) -> bool:
        """To the host, and blocking. A row's words are copied to within the device, a few at a time."""
        if kwargs.get("non_blocking", any(a is True for a in args[2:3])):
            return False
        onto = args[1] if name == "to" and len(args) > 1 else kwargs.get("device")
        return (name in ("to", "_to_copy") and str(onto) == "cpu") or (name == "copy_" and args[0].numel() > 16)

    def _masks(self, name: str, args: Any) -> bool:
        kinds = (torch.bool, torch.uint8)
        return name in ("index", "__getitem__") and any(
            isinstance(i, Tensor) and i.dtype in kinds for i in flat(args[1:])
        )


def flat(values: Any) -> list[Any]:
    return [x for v in values for x in (flat(v) if isinstance(v, (list, tuple)) else [v])]


class Below(TorchDispatchMode):
    """Sees every operation, also those that others are made of."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.guard.look(func.overloadpacket.__name__, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Above(TorchFunctionMode):
    """Sees what does nothing on a CPU tensor, and so never gets below."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self.guard = guard

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.guard.look(getattr(func, "__name__", ""), args, kwargs or {})
        return func(*args, **(kwargs or {}))


def waits_in_a_step(watch: Any, *probes: Any) -> tuple[list[str], Any]:
    """What would have waited in one observed step of training."""
    model = net()
    seen = watch(model, *probes)
    stream = Landed()
    hold(seen, stream)
    train(model, seen.tap, 1)  # what is made once is made now
    optimizer, batch, guard = torch.optim.SGD(model.parameters(), 0.1), torch.randn(5, 3), Guard(stream)
    openly = patch.object(
        tensors, "without_torch_function", contextlib.nullcontext
    )  # what we do is hidden from function modes
    with openly, Below(guard), Above(guard):
        model(batch).square().sum().backward()
        optimizer.step()
        seen.tap.step()
    return guard.found, seen


def test_a_step_waits_for_nothing(watch, device_path):
    """Forward, backward, optimizer and closing: no operation of ours needs a value on the host."""
    found, seen = waits_in_a_step(watch, *everything())
    assert found == []
    assert len([r for r in seen.records if r.step == 1]) > 20
    assert all(np.isfinite(r["l2"]) for r in seen.records)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(), lambda x: bool(x.any()), lambda x: x.cpu(), lambda x: x.nonzero(),
        lambda x: x[x > 0], lambda x: x.unique(), lambda x: torch.equal(x, x), lambda x: x.tolist(),
        lambda x: x.to("cpu"), lambda x: torch.empty(5, 8).copy_(x), lambda x: float(x.sum()), lambda x: x.numpy(),
    ],
)  # fmt: skip
def test_the_watch_for_waiting_can_fail(watch, device_path, wait):
    """A reducer of the user's that waits is noticed, so a wait of ours would be."""

    def waits(x: Tensor) -> None:
        wait(x)

    found, _ = waits_in_a_step(watch, tt.probe("0", keep=waits))
    assert found


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float64", "int64", "bool", "complex64"])
def test_a_reduction_stays_on_its_device(name):
    """On tensors without data, as on a device, every operation is one that needs none, and none mixes devices."""
    x = torch.empty(5000, dtype=getattr(torch, name), device="meta")
    words = torch.zeros(device_ops.WORDS + device_ops.COUNT_WORDS, dtype=torch.int64, device="meta")
    device_ops.reduce(x, words, True)
    for wait in (lambda: words[0].item(), lambda: words + torch.ones(len(words)), lambda: words.cpu()):
        with pytest.raises((RuntimeError, NotImplementedError)):
            wait()


def test_step_returns_before_the_device_is_done(watch, device_path):
    """Closing a step starts one copy; the writer's thread waits for it, and writes the rows then."""
    model = net()
    seen = watch(model, "{0,1,2}")
    stream = Held()
    hold(seen, stream)
    train(model, seen.tap, 1)
    assert not seen.memory.records and stream.copies == 1
    stream.finished.set()
    assert len(seen.records) == 3 and seen.one("0:output")["std"] > 0
    assert set(stream.waiting) == {"tensortap-writer"}


def test_a_trigger_that_asks_for_values_waits(watch, device_path):
    """`nonfinite()` can only be answered by the values: closing the step waits for them, and decides rightly."""
    model = net()
    seen = watch(model, tt.probe("**", when=tt.nonfinite()))
    stream = Held()
    stream.finished.set()
    hold(seen, stream)
    model(torch.randn(5, 3))
    seen.tap.step()
    model(torch.full((5, 3), float("nan")))
    seen.tap.step()
    assert seen.steps == [1] and threading.current_thread().name in stream.waiting


def test_a_trigger_on_a_metric_does_not_wait(watch, device_path):
    """StepSource are kept, held for look-back and dropped while the device is busy; values find their rows later."""
    model = net()
    when = tt.metric("loss") > 1
    seen = watch(model, tt.probe("0", when=when, keep=tt.full()), tt.probe("2", when=tt.every(3)), lookback=1)
    stream = Held()
    hold(seen, stream)
    outputs = []
    for loss in (0, 0, 0, 5, 0):
        outputs.append(model(torch.randn(5, 3)).detach())
        seen.tap.step(loss=loss)
    assert not stream.waiting or set(stream.waiting) == {"tensortap-writer"}
    stream.finished.set()
    assert [(r.step, r.place.site) for r in seen.records] == [(0, "2"), (2, "0"), (3, "0"), (3, "2")]
    for record in seen.of("2:output"):
        assert record["max"] == float(outputs[record.step].max())
    assert [kept.array.shape for kept in seen.memory.tensors] == [(5, 8)] * 2


def test_a_metric_on_the_device_is_not_waited_for(watch, device_path, monkeypatch):
    """`tap.step(loss=loss)` gives the tensor on its way: it is written when it has arrived, and a trigger may wait."""
    stream = Held()
    monkeypatch.setattr(metrics, "stream_of", lambda device: stream)
    model = net()
    seen = watch(model, tt.probe("0", when=tt.every(10)))
    model(torch.randn(5, 3))
    seen.tap.step(loss=torch.tensor(0.5), lr=0.1)
    assert seen.memory.metrics == {} and "MainThread" not in stream.waiting
    stream.finished.set()
    seen.tap.flush()
    assert seen.memory.metrics == {0: {"loss": 0.5, "lr": 0.1}} and set(stream.waiting) == {"tensortap-writer"}


def test_a_trigger_that_reads_a_metric_on_the_device_waits_for_it(watch, device_path, monkeypatch):
    """The decision needs the number, so closing the step waits; on another metric it does not."""
    stream = Held()
    stream.finished.set()
    monkeypatch.setattr(metrics, "stream_of", lambda device: stream)
    model = net()
    seen = watch(model, tt.probe("0", when=tt.metric("loss") > 1))
    for loss in (0.5, 2.0):
        model(torch.randn(5, 3))
        seen.tap.step(loss=torch.tensor(loss), other=torch.tensor(1.0))
    assert seen.steps == [1]
    assert stream.waiting.count(threading.current_thread().name) == 2


def test_a_metric_that_is_no_number_is_named(watch, device_path):
    """A tensor of several elements is refused with what to write, on a device as on the host; `strict` raises."""
    seen, strict = watch(net()), watch(net(), strict=True)
    with pytest.warns(tt.TensortapWarning, match=r"it has 2 elements.*step\(loss=float.*refused_metrics"):
        seen.tap.step(loss=torch.ones(2))
    with pytest.raises(ProbeError, match=r"it has 2 elements.*step\(loss=float"):
        strict.tap.step(loss=torch.ones(2))


def test_on_nonfinite_names_the_first_record(watch, device_path):
    """The origin is looked for at the end of the step: the module is named, the operation inside it is not."""
    model = net()
    with torch.no_grad():
        model[2].weight.fill_(float("inf"))
    seen = watch(model, on_nonfinite="raise")
    with pytest.raises(NonFiniteError, match="first seen in 2, forward"):
        model(torch.rand(5, 3))
        seen.tap.step()


# --- one buffer ---------------------------------------------------------------------------------
