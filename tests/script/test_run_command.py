"""`tensortap run`: a script runs as `python` would run it, and the models in it are found and observed."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tensortap as tt

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
# Without torch.optim, which a new process takes as long to import as all the rest.
BY_HAND = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
for step in range({steps}):
    loss = model(torch.randn(16, 4)).pow(2).mean()
    loss.backward()
    print(f"{{loss.item():.9f}}", flush=True)
"""


def python(*words, cwd, stdin="", **more):
    # One thread: the machine may be busy, and results must not depend on how many there are.
    env = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", **more}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, input=stdin, env=env)


def observed(*words, cwd, **more):
    return python("-m", "tensortap", "run", *words, cwd=cwd, **more)


@pytest.fixture
def quickly(warm_python, tmp_path):
    """Run `python WORDS`, or `tensortap run WORDS`, without waiting for imports: where no traceback is compared."""

    def run(*words, bare=False):
        return warm_python.run(words if bare else ["-m", "tensortap", "run", *words], tmp_path)

    return run


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


def test_what_cannot_run(tmp_path, quickly):
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
        done = quickly(*words)
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert ("ran" in done.stdout) == (code == 0)


def test_a_training_script(tmp_path, quickly):
    """Every step is there with the loss that the script printed, bit for bit, and nothing the script prints differs."""
    name = script(tmp_path, TRAIN.format(steps=5))
    done = quickly("--sites", "**:output", "--sites", "0.weight:grad", "--to", "out", "--", name)
    same(done, quickly(name, bare=True))
    assert ours(done.stderr)[-1] == "look at them: tensortap show out"
    run = tt.open(tmp_path / "out")
    assert run.steps == [0, 1, 2, 3, 4]
    assert run.sites == [f"{site}:output" for site in ("0", "1", "2", "")] + ["0.weight:grad"]
    losses = [f"{value:.9f}" for value in run.metrics()["value"].to_pylist()]
    assert losses == done.stdout.split()
    assert {record.phase for record in run.records()} == {"train"}
    assert run.state == "finished"


def test_options(tmp_path, quickly):
    """Steps, sites and what to keep can be chosen; the default folder is named after the script; a run can go on."""
    name = script(tmp_path, TRAIN.format(steps=5))
    words = ["--every", "2", "--sites", "2", "--keep", "stats", "--keep", "rows:0,2", "--keep", "sample:3", name]
    done = quickly(*words)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "runs").iterdir()
    assert path.name.endswith("-script")
    run = tt.open(path)
    assert (run.steps, run.sites) == ([0, 2, 4], ["2:output"])
    assert run.tensor("2", 4, kind="rows").shape == (2, 1)
    assert len(run.metrics()) == 5
    quickly("--to", path, "--resume", *words)
    assert tt.open(path).steps == [0, 2, 4, 6, 8]


def test_a_pattern_that_fits_nothing(tmp_path, quickly):
    """It is said at the first call of the model, with what would fit; the script and the other patterns go on."""
    name = script(tmp_path, TRAIN.format(steps=2))
    done = quickly("--sites", "0", "--sites", "type:Conv2d", "--to", "out", name)
    assert done.returncode == 0
    assert "'type:Conv2d' matches none" in ours(done.stderr)[0]
    assert tt.open(tmp_path / "out").sites == ["0:output"]


def test_an_error_in_backward(tmp_path):
    """What the script runs through without knowing it is not in the traceback, and the steps before it are kept."""
    text = BY_HAND.format(steps=2) + "loss.backward()\n"
    name = script(tmp_path, text)
    done = observed("--to", "out", name, cwd=tmp_path)
    same(done, python(name, cwd=tmp_path))
    assert "second time" in done.stderr
    assert tt.open(tmp_path / "out").steps == [0, 1]


def test_an_interrupt_while_training(tmp_path):
    """Ctrl-C ends the process as it ends `python`, and what was seen is kept."""
    name = script(tmp_path, BY_HAND.format(steps=10**9))
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


def test_several_models(tmp_path, quickly):
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
    done = quickly("--to", "out", "--watch", "outputs", name)
    same(done, quickly(name, bare=True))
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


def test_what_is_not_seen(tmp_path, quickly):
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
    said = ours(quickly("--sites", "{used,spare,}", "--to", "out", name).stderr)
    assert "not watched: LayerNorm: not registered in the model that calls it, or added to it later" in said
    assert any(line.startswith("not seen: Net.spare:output") for line in said)
    assert "NaN or Inf, first at step 0 in Net:output" in said


def test_a_script_without_a_model(tmp_path, quickly):
    """A script that calls nothing with parameters writes no run, and one without torch does not load it."""
    name = script(tmp_path, "import torch; torch.nn.ReLU()(torch.ones(1))")
    assert ours(quickly(name).stderr) == ["no model was seen: no module with parameters was called"]
    name = script(tmp_path, "import sys; print('torch' in sys.modules)")
    assert quickly(name).stdout == "False\n"
    assert not (tmp_path / "runs").exists()
