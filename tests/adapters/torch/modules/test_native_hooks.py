"""Hooks that C answers: the rows of the Python way, to the last bit, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import Contract
from subjects import subject_of
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.modules.hooks import ForwardPreHook, OutputHook
from tensortap.adapters.torch.modules.tensors import HOOK_VARIABLE, use_point
from tensortap.reduce import kernel as kernels
from tensortap.reduce.statistics import COLUMNS

pytestmark = pytest.mark.skipif(
    kernels.ACTIVE == "numpy" or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="needs the C kernel and PyTorch's C exchange API",
)
PROMISES = [
    name
    for name, test in inspect.getmembers(Contract, inspect.isfunction)
    if name.startswith("test_") and set(inspect.signature(test).parameters) <= {"self", "subject", "tmp_path"}
]
COMPARED = [name for name in COLUMNS if name not in ("time", "hist_counts")]


class Listening:
    """A subject of the contract whose taps also write to a memory of the test's own."""

    def __init__(self) -> None:
        self.subject = subject_of("torch")
        self.memories: list[tt.Memory] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.subject, name)

    def watch(self, *probes: Any, **options: Any) -> Any:
        """Watch with one more sink."""
        self.memories.append(memory := tt.Memory())
        given = options.pop("to", [])
        return self.subject.watch(
            *probes, to=[*given, memory] if isinstance(given, list) else [given, memory], **options
        )

    def rows(self) -> list[list[str]]:
        """Every row of every tap, as text: NaN equals NaN."""
        return [
            [*(str(record[name]) for name in COMPARED), str(record["hist_counts"])]
            for memory in self.memories
            for record in sorted(memory.records, key=lambda record: (record.step, record.seq))
        ]


@pytest.mark.parametrize("promise", PROMISES)
def test_both_ways_keep_the_contract_with_the_same_rows(
    promise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each promise of the contract holds when C answers the hooks and when Python does, and the rows are equal."""
    seen = []
    for way in ("c", "python"):
        monkeypatch.setenv(HOOK_VARIABLE, way)
        subject = Listening()
        test = getattr(Contract, promise)
        given = {"subject": subject, "tmp_path": tmp_path / way}
        (tmp_path / way).mkdir()
        test(Contract(), **{name: given[name] for name in inspect.signature(test).parameters if name in given})
        seen.append(subject.rows())
    assert seen[0] == seen[1]


def block() -> nn.Module:
    """A model small enough to be watched a thousand times."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def hook_of(module: nn.Module) -> Any:
    """The hook of ours that a module carries after its forward."""
    return next(hook for hook in module._forward_hooks.values() if isinstance(hook, OutputHook))


def test_c_answers_the_hooks() -> None:
    """The Python method is called for the first tensor of a site, and for none after it."""
    model, x = block(), torch.randn(3, 4)
    calls = []
    with tt.watch(model, "0", to=(memory := tt.Memory())) as watching:
        model(x)
        hook = hook_of(model[0])
        hook.connect(hook.observer.reader(hook.steps), lambda *given: calls.append(given), 2)
        point = hook.port.point("")
        use_point(hook, point)
        model(x)
        watching.step()
    assert not calls and len(memory.records) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_whole_tensors_are_the_same_by_both_ways(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """C copies dense tensors; views, single elements, several probes and lazily conjugated numbers go to Python."""
    probes = (tt.probe("0", "2", keep=tt.full()), tt.probe("1", "2", keep=[tt.full(), tt.sample(3)]))
    torch.manual_seed(0)
    x = (5 * torch.randn(6, 4, 3)).to(dtype)
    seen = []
    for way in ("c", "python"):
        monkeypatch.setenv(HOOK_VARIABLE, way)
        model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())
        with tt.watch(model, *probes, to=(memory := tt.Memory())) as watching:
            for given in (x, x + x, x.mT, x[:1, :1, :1], x[::2].contiguous(), x.conj()):
                computed = given.clone(memory_format=torch.preserve_format)
                model(computed)
                computed.zero_()  # what is kept is a copy
                watching.step()
        kept = [(k.record.step, str(k.record.place), k.kind, str(k.array.dtype), k.array.shape) for k in memory.tensors]
        seen.append((kept, [k.array.tobytes() for k in memory.tensors]))
    assert seen[0] == seen[1] and len(seen[0][0]) == 6 * 6
    assert memory.tensors[0].array.tobytes() == x.contiguous().view(torch.uint8).numpy().tobytes()


def test_a_conjugated_tensor_is_kept_as_its_values_are() -> None:
    """Lazy conjugation is a flag of the tensor: its memory has the numbers before it."""
    model, x = nn.Sequential(nn.Identity()), torch.randn(3, 4, dtype=torch.complex64)
    with tt.watch(model, tt.probe("0", keep=[tt.full(), tt.hash()]), to=(memory := tt.Memory())) as watching:
        for given in (x, x.conj(), x.conj().resolve_conj()):
            model(given)
        watching.step()
    assert np.array_equal(memory.tensors[1].array, x.numpy().conj())
    first, second, third = (record["hash"] for record in memory.records)
    assert first != second == third


def test_whole_tensors_are_kept_by_c() -> None:
    """Python is not called for a whole tensor, except for the first one of a place."""
    model, x = block(), torch.randn(3, 4)
    with tt.watch(model, tt.probe("0", keep=tt.full()), to=(memory := tt.Memory())) as watching:
        expected = [model[0](x).detach().numpy()]
        model(x)
        hook, point = hook_of(model[0]), hook_of(model[0]).plain
        hook.connect(hook.observer.reader(hook.steps), lambda *given: pytest.fail("Python was called"), 2)
        use_point(hook, point)
        model(x + 1)
        expected.append(model[0](x + 1).detach().numpy())
        watching.step()
    arrays = [kept.array for kept in memory.tensors]
    assert [np.array_equal(arrays[i], expected[j]) for i, j in ((0, 0), (1, 0), (2, 1), (3, 1))] == [True] * 4


def test_a_hook_shows_python_and_runs_c() -> None:
    """What the compiler follows is a Python function; calling an object does not call it."""
    for kind in (OutputHook, ForwardPreHook):
        assert isinstance(vars(kind)["__call__"], types.FunctionType)
        assert isinstance(kind.__call__, types.FunctionType)


@pytest.mark.parametrize("given", [(), (None,), (1, 2, 3), ((), ()), (None, (), {}), (None, None, None, None)])
def test_odd_calls_reach_python(given: tuple[Any, ...]) -> None:
    """Whatever a hook is called with, C reads nothing that is not one plain tensor."""
    model = block()
    with tt.watch(model, "0", "0:input", to=[]):
        model(torch.randn(3, 4))
        for position, hooks in ((2, model[0]._forward_hooks), (1, model[0]._forward_pre_hooks)):
            (hook,) = hooks.values()
            seen: list[Any] = []
            hook.connect(hook.observer.reader(hook.steps), lambda *rest, seen=seen: seen.append(rest), position)
            hook.use_point(0, 1, 0)
            hook(*given)
            assert seen == [(hook, *given)]


def test_an_empty_dict_as_output_is_no_input() -> None:
    """A module that takes a tensor and returns an empty dict gave no tensor."""

    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {} if self.empty else x

        empty = False

    model = nn.Sequential(Empty())
    with tt.watch(model, "0", to=(memory := tt.Memory())) as watching:
        model(torch.ones(2, 2))
        watching.step()
        model[0].empty = True
        model(torch.ones(2, 2))
        watching.step()
    assert [record.step for record in memory.records] == [0]


def test_threads_call_pause_and_collect_at_once() -> None:
    """Threads that call one watched model while others pause it, close its steps and collect garbage do no harm."""
    model, x = block(), torch.randn(64, 4)
    errors: list[BaseException] = []

    def repeat(work: Any) -> None:
        try:
            for _ in range(20):
                work()
        except BaseException as error:  # the test tells of it
            errors.append(error)

    with tt.watch(model, "*", "*:input", to=(memory := tt.Memory())) as watching, torch.no_grad():
        works = [
            lambda: model(x),
            lambda: model(x),
            watching.step,
            watching.pause,
            watching.resume,
            lambda: gc.collect(1),
        ]
        threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        repeat(lambda: model(x))
        for thread in threads:
            thread.join()
        watching.resume()
        watching.step()
        model(x)
        watching.step()
    assert not errors
    assert {record["shape"] for record in memory.records} <= {(64, 4), (64, 2)}


def test_gradients_have_the_call_of_their_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is called twice, and a second backward over one graph: the calls that the Python way gives."""
    seen = []
    for way in ("c", "python"):
        monkeypatch.setenv(HOOK_VARIABLE, way)
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.full((3, 4), 0.5)
        nn.init.ones_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        with tt.watch(model, "*:grad_output", to=(memory := tt.Memory())) as watching:
            for _ in range(2):
                loss = model(model(x)).sum()
                loss.backward(retain_graph=True)
                loss.backward()
                watching.step()
        seen.append([(str(r.place), r.step, r.call, r["mean"], r["l2"]) for r in memory.records])
    assert seen[0] == seen[1] and len(seen[0]) == 16


def test_a_forked_child_records_nothing_and_lives() -> None:
    """A child that inherits the hooks computes the same, and its parent's rows are the parent's alone."""
    model, x = block(), torch.randn(3, 4)
    with tt.watch(model, to=(memory := tt.Memory())) as watching, torch.no_grad():
        expected = model(x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(model(x), expected) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        watching.step()
    assert {record.call for record in memory.records} == {0}


def test_copies_and_pickles_have_no_hook() -> None:
    """What is made of a watched model has no hook of ours; a hook copied by hand does nothing."""
    model, x = block(), torch.randn(3, 4)
    with tt.watch(model, "0", "0:input", to=(memory := tt.Memory())) as watching:
        model(x)
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved_and_loaded(model)):
            assert not made[0]._forward_hooks and not made[0]._forward_pre_hooks
            assert torch.equal(made(x), model(x))
        for by_hand in (copy.copy, copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))):
            assert by_hand(hook_of(model[0]))(model[0], (x,), x) in (None, False)
        watching.step()
    assert len([record for record in memory.records if record.place.port == "output"]) == 4


def saved_and_loaded(model: nn.Module) -> nn.Module:
    """A model that went through torch.save."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def test_a_cycle_of_hooks_is_collected() -> None:
    """A watched model that everybody forgot goes away with its hooks, its tap and its reader."""
    gone = []
    for _ in range(3):
        model = block()
        watching = tt.watch(model, "*", "*:input", to=[])
        model(torch.randn(3, 4))
        gone.append((weakref.ref(model), weakref.ref(watching)))
        watching.close()
        model.hook = list(model[0]._forward_hooks.values())
        model.again = model
        del model, watching
    gc.collect()
    assert [model() for model, _ in gone] == [None] * 3


def test_many_taps_leave_nothing() -> None:
    """Attaching, recording and detaching again and again leaves no object and no memory behind.

    `make asan` does it a thousand times.
    """
    model, x, times = block(), torch.randn(3, 4), int(os.environ.get("TENSORTAP_CYCLES", "30"))

    def cycle(times: int) -> None:
        for _ in range(times):
            with tt.watch(model, "*", "*:input", "*:grad_output", to=[]) as watching:
                model(x).sum().backward()
                watching.step()

    def count() -> tuple[int, int]:
        gc.collect()
        return len(gc.get_objects()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    cycle(10)
    objects, kilobytes = count()
    cycle(times)
    more_objects, more_kilobytes = count()
    assert more_objects - objects < times
    if "asan" not in os.environ.get("LD_PRELOAD", ""):  # the sanitizer keeps what is freed for a while
        assert more_kilobytes - kilobytes < 4 << 10


SUBINTERPRETER = """
import importlib.machinery, sys
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
loader = importlib.machinery.ExtensionFileLoader
code = '''
import importlib.machinery, importlib.util
spec = importlib.util.spec_from_file_location("tensortap.reduce._kernel", {path!r})
importlib.util.module_from_spec(spec).__spec__.loader.exec_module(importlib.util.module_from_spec(spec))
'''
try:
    failed = interpreters.run_string(interpreters.create(), code.format(path=sys.argv[1]))
except Exception as error:
    failed = error
print(failed)
"""


def test_subinterpreters_are_refused() -> None:
    """Importing the kernel in a subinterpreter fails with a sentence that says what to do instead."""
    command = [sys.executable, "-c", SUBINTERPRETER, str(kernels.library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "subinterpreters" in done.stdout, done.stdout + done.stderr


def test_a_spawned_process_has_no_hooks() -> None:
    """A watched model that is sent to another process arrives without hooks."""
    model = block()
    with tt.watch(model, to=[]):
        model(torch.randn(3, 4))
        data = multiprocessing.reduction.ForkingPickler.dumps(model)
    assert not pickle.loads(data)[0]._forward_hooks
