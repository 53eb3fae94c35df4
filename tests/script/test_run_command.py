"""`tensortap run`: a script runs as `python` would run it, and the models in it are found and observed."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import tensortap as tt
from tensortap.adapters.torch.script.watcher import ScriptWatcher
from tensortap.select.probes import probe

SOURCE = str(Path(tt.__file__).parents[1])
OURS = "tensortap: "

TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({steps}):
    loss = model(torch.randn(16, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{{loss.item():.9f}}", flush=True)
"""


def python(*words, cwd, stdin="", **more):
    # One thread: the machine may be busy, and results must not depend on how many there are.
    env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, input=stdin, env=env)


def observed(*words, cwd, **more):
    return python("-m", "tensortap", "run", *words, cwd=cwd, **more)


def script(folder, text, name="script.py"):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return name


def theirs(stderr):
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith(OURS))


def ours(stderr):
    return [line.removeprefix(OURS) for line in stderr.splitlines() if line.startswith(OURS)]


def same(done, expected):
    assert done.stdout == expected.stdout
    assert theirs(done.stderr) == expected.stderr
    assert done.returncode == expected.returncode


PLAIN = {
    "its names and arguments": """
        import os, sys
        print(sys.argv, __name__, __file__, __spec__, __package__, type(__loader__).__name__, os.getcwd())
        print(sys.path[0], sorted(globals()), sys.modules["__main__"].__dict__ is globals())
    """,
    "an exit code": "import sys; sys.exit(3)",
    "an exit message": "import sys; sys.exit('so long')",
    "an error": """
        def inner():
            raise ValueError("from inside")
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("from outside") from error
    """,
    "a syntax error": "print('never'\nx = = 1",
    "an interrupt": "raise KeyboardInterrupt",
    "standard input": "print(input().upper())",
    "a warning": "import warnings; warnings.warn('careful')",
    "its own excepthook": """
        import sys
        sys.excepthook = lambda kind, error, trace: print(kind.__name__, trace.tb_frame.f_code.co_name)
        raise OSError
    """,
    "what it does at exit": "import atexit, sys; atexit.register(print, 'the end'); sys.exit(4)",
    "a thread that goes on": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.2), print("later"))).start()
        print("sooner")
    """,
}


@pytest.mark.parametrize("text", PLAIN.values(), ids=PLAIN)
def test_as_python(tmp_path, text):
    """Output, errors and exit code are those of `python`, and the one line more says that there was no model."""
    name = script(tmp_path, text)
    done = observed(name, "--every", "x y", cwd=tmp_path, stdin="abc\n")
    same(done, python(name, "--every", "x y", cwd=tmp_path, stdin="abc\n"))
    assert ours(done.stderr) == ["no model was seen: the script did not import torch"]


def test_as_python_m(tmp_path):
    """Modules, packages and folders run as with `python -m` and `python folder`."""
    text = "import sys; print(sys.argv, __name__, __spec__.name, __package__, sys.path[0]); 1 / len(sys.argv[2:])"
    for name in ("pack/__init__.py", "pack/__main__.py", "pack/part.py"):
        script(tmp_path, "" if "init" in name else text, name)
    for words in (["-m", "pack.part", "a"], ["-m", "pack", "a", "b"], ["pack", "a", "b"], ["-m", "nothing"]):
        same(observed(*words, cwd=tmp_path), python(*words, cwd=tmp_path))


def test_what_cannot_run(tmp_path):
    """A missing script, a wrong option and an occupied folder are said before anything runs."""
    script(tmp_path, "print('ran')")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    for words, code, said in (
        (["nowhere.py"], 2, "can't open file"),
        ([], 2, "SCRIPT"),
        (["--keep", "everything", "script.py"], 1, "sample:256"),
        (["--sites", "fc:outptu", "script.py"], 0, ""),
        (["--to", "old", "script.py"], 1, "--overwrite"),
        (["--every", "0", "script.py"], 2, "--every"),
    ):
        done = observed(*words, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert ("ran" in done.stdout) == (code == 0)


def test_a_training_script(tmp_path):
    """Every step is there with the loss that the script printed, bit for bit, and nothing the script prints differs."""
    name = script(tmp_path, TRAIN.format(steps=5))
    done = observed("--sites", "**:output", "--sites", "0.weight:grad", "--to", "out", "--", name, cwd=tmp_path)
    same(done, python(name, cwd=tmp_path))
    assert ours(done.stderr)[-1] == "look at them: tensortap show out"
    run = tt.open(tmp_path / "out")
    assert run.steps == [0, 1, 2, 3, 4]
    assert run.sites == [f"{site}:output" for site in ("0", "1", "2", "")] + ["0.weight:grad"]
    losses = [f"{value:.9f}" for value in run.metrics()["value"].to_pylist()]
    assert losses == done.stdout.split()
    assert {record.phase for record in run.records()} == {"train"}
    assert run.state == "finished"


def test_options(tmp_path):
    """Steps, sites and what to keep can be chosen; the default folder is named after the script; a run can go on."""
    name = script(tmp_path, TRAIN.format(steps=5))
    words = ["--every", "2", "--sites", "2", "--keep", "stats", "--keep", "rows:0,2", "--keep", "sample:3", name]
    done = observed(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs").iterdir()
    assert path.name.endswith("-script")
    run = tt.open(path)
    assert (run.steps, run.sites) == ([0, 2, 4], ["2:output"])
    assert run.tensor("2", 4, kind="rows").shape == (2, 1)
    assert len(run.metrics()) == 5
    observed("--to", path, "--resume", *words, cwd=tmp_path)
    assert tt.open(path).steps == [0, 2, 4, 6, 8]


def test_a_pattern_that_fits_nothing(tmp_path):
    """It is said at the first call of the model, with what would fit; the script and the other patterns go on."""
    name = script(tmp_path, TRAIN.format(steps=2))
    done = observed("--sites", "0", "--sites", "type:Conv2d", "--to", "out", name, cwd=tmp_path)
    assert done.returncode == 0
    assert "'type:Conv2d' matches none" in ours(done.stderr)[0]
    assert tt.open(tmp_path / "out").sites == ["0:output"]


def test_an_error_in_backward(tmp_path):
    """What the script runs through without knowing it is not in the traceback, and the steps before it are kept."""
    text = TRAIN.format(steps=2) + "loss.backward()\n"
    name = script(tmp_path, text)
    done = observed("--to", "out", name, cwd=tmp_path)
    same(done, python(name, cwd=tmp_path))
    assert "second time" in done.stderr
    assert tt.open(tmp_path / "out").steps == [0, 1]


def test_an_interrupt_while_training(tmp_path):
    """Ctrl-C ends the process as it ends `python`, and what was seen is kept."""
    name = script(tmp_path, TRAIN.format(steps=10**9))
    bare, _ = _interrupted([name], tmp_path)
    code, stderr = _interrupted(["-m", "tensortap", "run", "--to", "out", name], tmp_path)
    assert code == bare != 0
    text = stderr.decode()
    assert theirs(text).startswith('Traceback (most recent call last):\n  File "' + str(tmp_path / name))
    assert theirs(text).endswith("KeyboardInterrupt\n")
    assert tt.open(tmp_path / "out").state == "finished"
    assert len(tt.open(tmp_path / "out").steps) >= 2


def _interrupted(words, folder):
    """The exit code and stderr of a Python process that is interrupted after its third line."""
    env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


def test_several_models(tmp_path):
    """A generator and a discriminator are in one run under the script's names for them, a step per optimizer step."""
    name = script(
        tmp_path,
        """
        import torch
        from torch import nn

        def main():
            torch.manual_seed(0)
            maker, judge = nn.Sequential(nn.Linear(2, 4)), nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
            makers, judges = (torch.optim.Adam(m.parameters()) for m in (maker, judge))
            loss_of = nn.BCELoss()
            for _ in range(3):
                judges.zero_grad()
                loss_of(judge(torch.randn(8, 4)), torch.ones(8, 1)).backward()
                loss_of(judge(maker(torch.randn(8, 2)).detach()), torch.zeros(8, 1)).backward()
                judges.step()
                makers.zero_grad()
                loss_of(judge(maker(torch.randn(8, 2))), torch.ones(8, 1)).backward()
                makers.step()
            print(loss_of(judge(torch.ones(1, 4)), torch.ones(1, 1)).item())

        main()
        """,
    )
    done = observed("--to", "out", name, cwd=tmp_path)
    same(done, python(name, cwd=tmp_path))
    run = tt.open(tmp_path / "out")
    assert sorted(run.sites) == [f"{site}:output" for site in ("judge.0", "judge.1", "judge", "maker.0", "maker")]
    assert [len(list(run.records(steps=step))) for step in run.steps] == [8, 5] * 3 + [3]
    assert "maker (Sequential)" in done.stderr and "judge (Sequential)" in done.stderr


def test_processes(tmp_path):
    """Spawned and forked children run as they would, unobserved and without a word."""
    name = script(
        tmp_path,
        """
        import multiprocessing as mp, os
        import torch

        model = torch.nn.Linear(2, 2)

        def work(n):
            return float(model(torch.full((1, 2), float(n))).isfinite().all()) + n

        if __name__ == "__main__":
            torch.manual_seed(0)
            model(torch.ones(1, 2))
            for method in ("spawn", "fork"):
                with mp.get_context(method).Pool(1) as pool:
                    print(method, pool.map(work, [1, 2]))
        """,
    )
    done = observed("--to", "out", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "spawn [2.0, 3.0]\nfork [2.0, 3.0]\n"
    assert len(ours(done.stderr)) == 2
    assert tt.open(tmp_path / "out").steps == [0]


def test_what_is_not_seen(tmp_path):
    """Layers that never run, layers kept in a plain list and NaN are spoken of at the end."""
    name = script(
        tmp_path,
        """
        import torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.spare, self.hidden = nn.Linear(2, 2), nn.Linear(2, 2), [nn.LayerNorm(2)]

            def forward(self, x):
                return self.hidden[0](self.used(x).abs().neg().log())

        with torch.no_grad():
            Net()(-torch.ones(1, 2))
        """,
    )
    said = ours(observed("--sites", "{used,spare,}", "--to", "out", name, cwd=tmp_path).stderr)
    assert "not watched: LayerNorm: not registered in the model that calls it, or added to it later" in said
    assert any(line.startswith("not seen: Net.spare:output") for line in said)
    assert "NaN or Inf, first at step 0 in Net:output" in said


def test_a_script_without_a_model(tmp_path):
    """A script that calls nothing with parameters writes no run, and one without torch does not load it."""
    name = script(tmp_path, "import torch; torch.nn.ReLU()(torch.ones(1))")
    assert ours(observed(name, cwd=tmp_path).stderr) == ["no model was seen: no module with parameters was called"]
    name = script(tmp_path, "import sys; print('torch' in sys.modules)")
    assert observed(name, cwd=tmp_path).stdout == "False\n"
    assert not (tmp_path / "runs").exists()


def leaves(site):
    return site.leaf


class Seen:
    """What a watcher in this process has found."""

    def __init__(self):
        self.memory, self.said, self.tap = tt.Memory(), [], None
        self.backward = torch.autograd.backward
        self.watcher = ScriptWatcher(probe(leaves).patterns, self.begin, self.said.append)

    def begin(self, models):
        self.tap = tt.watch(models, leaves, to=self.memory)
        return self.tap

    def steps(self):
        """For each step its phase and how many records it has."""
        self.watcher.stop()
        self.tap.close()
        assert self.said == []
        assert torch.autograd.backward is self.backward
        counts = {}
        for record in self.memory.records:
            counts[record.step, record.phase] = counts.get((record.step, record.phase), 0) + 1
        return [(phase, count) for (_, phase), count in counts.items()]

    def losses(self):
        return [metrics["loss"] for metrics in self.memory.metrics.values()]


@pytest.fixture
def seen():
    found = Seen()
    yield found
    found.watcher.stop()
    found.tap.close()


def test_steps_of_accumulation(seen):
    """Micro-batches are one step, whose loss is their sum, from the first step on."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for n in range(6):
        (model(torch.ones(1, 2)).sum() * 0 + n).backward()
        if n % 3 == 2:
            optimizer.step()
    assert seen.steps() == [("train", 3), ("train", 3)]
    assert seen.losses() == [3.0, 12.0]


def test_steps_of_threads_have_their_own_numbers(seen):
    """Threads that call a model while it is first seen have a step for each call, numbered in its phase."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).eval()
    together = threading.Barrier(4, timeout=60)

    def answer(_):
        together.wait()
        with torch.inference_mode():
            for _ in range(5):
                model(torch.ones(1, 2))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(answer, range(4)))
    assert seen.steps() == [("eval", 2)] * 20
    assert sorted({record.step for record in seen.memory.records}) == list(range(20))


def test_garbage_names_no_loss(seen):
    """An optimizer that waits for the garbage collector does not give the loss an owner; one that is in use does."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    left_behind = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.0)
    left_behind.itself = left_behind
    del left_behind
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizers = []
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizers.append(torch.optim.Adam(other.parameters()))
    other(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    seen.steps()
    assert [list(metrics) for metrics in seen.memory.metrics.values()] == [["loss"], ["loss"], ["loss/other"]]


def test_steps_of_training_and_testing(seen):
    """Each batch of a test is a step, with the loss that a loss module gave; training then goes on."""
    model, loss_of = nn.Linear(2, 1), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model.train()
        for _ in range(2):
            loss_of(model(torch.ones(1, 2)), torch.zeros(1, 1)).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                loss_of(model(torch.ones(1, 2)), torch.zeros(1, 1))
    assert seen.steps() == ([("train", 1)] * 2 + [("eval", 1)] * 3) * 2
    assert {r.step for r in seen.memory.records if r.phase == "train"} == {0, 1, 2, 3}
    assert {r.step for r in seen.memory.records if r.phase == "eval"} == {0, 1, 2, 3, 4, 5}
    assert [sorted(metrics) for metrics in seen.memory.metrics.values()] == [["eval/loss", "loss"]] * 4 + [
        ["eval/loss"]
    ] * 2
    assert len({value for metrics in seen.memory.metrics.values() for value in metrics.values()}) == 1


def test_steps_with_a_teacher(seen):
    """A frozen model that is called in a training step is in that step, before or after the one that learns."""
    teacher, student = nn.Linear(2, 1).eval(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)
    for _ in range(3):
        with torch.no_grad():
            wanted = teacher(torch.ones(1, 2))
        (student(torch.ones(1, 2)) - wanted).square().sum().backward()
        optimizer.step()
    assert seen.steps() == [("train", 2)] * 3


def test_steps_without_an_optimizer(seen, monkeypatch):
    """Where weights are changed by hand a step ends after backward; where nothing is learnt, with each call."""
    monkeypatch.setattr("tensortap.adapters.torch.script.step_detector._any_optimizer", lambda: False)
    model = nn.Linear(2, 1)
    for _ in range(2):
        for _ in range(2):
            loss = model(torch.ones(1, 2)).sum()
        loss.backward()
    assert seen.steps() == [("train", 1)] * 4


def test_steps_of_parts(seen):
    """A part of a model that is called by itself makes steps as a model does, however often it calls its own parts."""
    relu = nn.ReLU()
    model = nn.ModuleDict({"coder": nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)}).eval()
    model.forward = lambda x: model["coder"](x)
    with torch.no_grad():
        model(torch.ones(1, 2))
        for _ in range(3):
            model["coder"](torch.ones(1, 2))
    assert seen.steps() == [("eval", 6)] * 4  # the ReLU is called twice, and has two names


def test_steps_of_checkpoints(seen):
    """What a checkpoint computes again belongs to the step, and is marked."""
    from torch.utils.checkpoint import checkpoint

    model = nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())
    model.forward = lambda x: checkpoint(lambda x: model[1](model[0](x)), x, use_reentrant=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(seen.steps()) == 2
    assert {record.recomputed for record in seen.memory.records} == {False, True}


def test_steps_after_an_interrupt(seen):
    """A call that ends with an error or an interrupt does not hide the calls after it."""

    class Net(nn.Linear):
        def forward(self, x):
            if len(x) > 1:
                raise KeyboardInterrupt
            return super().forward(x)

    model = Net(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for size in (1, 2, 1, 1):
        with contextlib.suppress(KeyboardInterrupt):
            model(torch.ones(size, 2)).sum().backward()
        optimizer.step()
    assert seen.steps() == [("train", 1)] * 3


def test_a_copy_of_a_watched_model(seen):
    """A deep copy is a model of its own, found when it is called, under a name of its own."""
    import copy

    model = nn.Sequential(nn.Linear(2, 1))
    model(torch.ones(1, 2))
    average = copy.deepcopy(model)
    average(torch.ones(1, 2))
    seen.steps()
    assert {record.place.site for record in seen.memory.records} >= {"average.0"}
    assert not average._forward_hooks and not model._forward_hooks and not model[0]._forward_hooks
