"""Scripts that other programs start, and processes that scripts start, record without an edit."""

import os
import shlex
import subprocess
import sys

import pytest
from tests.script.conftest import SOURCE, ours

import tensortap as tt
from tensortap.script import notebook
from tensortap.script.environment import options_here, python_path

TRAIN = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
SPAWN = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def work(rank, world, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4) * (rank + 1)).sum().backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(2, os.path.abspath("meeting")), nprocs=2)
    print("done")
"""


def test_processes_of_spawn_are_ranks(scripts):
    """Children of `mp.spawn` record as ranks of the run, under the model's own name, and one of them speaks."""
    done, run = scripts.observe(SPAWN, process=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert run.ranks == [0, 1] and run.steps == [0, 1, 2]
    assert run.info["model"]["class"] == "Sequential"
    said = ours(done)
    assert said[0].startswith("Sequential: 3 steps") and len(said) == 3
    assert said[-1].startswith("2 processes started by torch.multiprocessing (spawn)")


def test_a_launcher(scripts):
    """What torchrun starts records into the run that `tensortap run` was given."""
    name = scripts.write(TRAIN)
    words = ["--to", "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", name]
    done = scripts.python("-m", "tensortap", "run", *words)
    assert done.returncode == 0, done.stderr
    assert tt.open(scripts.folder / "run").steps == [0, 1, 2]


def test_by_environment(scripts, tmp_path):
    """With the line that `tensortap env` prints, TENSORTAP records a process; without TENSORTAP nothing is loaded."""
    printed = scripts.python("-m", "tensortap", "env").stdout
    path = shlex.split(printed.removeprefix("export PYTHONPATH="))[0]
    check = "import sys; sys.exit('tensortap' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": path}
    assert subprocess.run([sys.executable, "-c", check], env=env, timeout=300).returncode == 0
    env |= {"TENSORTAP": "run", "TENSORTAP_OPTIONS": '{"every": 2}', "OMP_NUM_THREADS": "1"}
    command = [sys.executable, scripts.write(TRAIN + "raise KeyError")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    run = tt.open(tmp_path / "run")
    assert run.steps == [0, 2] and done.returncode == 1
    assert "ended_by" in (tmp_path / "run" / "rank=0" / "_rank.json").read_text()


def test_options_of_the_environment(monkeypatch):
    """Options that do not exist are refused by name, and what is no JSON object is shown how to write it."""
    monkeypatch.setenv("TENSORTAP", "runs/x")
    for text, said in (('{"evry": 2}', "got evry"), ("every=2", "JSON object"), ("[1]", "JSON object")):
        monkeypatch.setenv("TENSORTAP_OPTIONS", text)
        with pytest.raises(tt.TensortapError, match=said):
            options_here("train.py")
    monkeypatch.setenv("TENSORTAP_OPTIONS", '{"sites": ["0"], "every": 2}')
    assert options_here("train.py").sites == ("0",)
    assert SOURCE in python_path().split(os.pathsep)


def test_a_notebook(tmp_path, monkeypatch, capsys):
    """After `%load_ext tensortap` what cells train is recorded, until the extension is unloaded."""
    monkeypatch.chdir(tmp_path)
    tt.load_ipython_extension(None)
    exec(TRAIN, {})
    notebook.unload_ipython_extension(None)
    (path,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert tt.open(path).steps == [0, 1, 2]
    assert "Sequential: 3 steps" in capsys.readouterr().err
