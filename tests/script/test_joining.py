"""Scripts that other programs start, and processes that scripts start, record without an edit."""

import json
import os
import shlex
import subprocess
import sys

import pytest
from tests.script.conftest import SOURCE, ours

import tensortap as tt
from tensortap.distributed.ranks import SPAWNED
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
# Without torch.optim, which a new process takes as long to import as all the rest.
BY_HAND = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
"""
SPAWN = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def train(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4) * (rank + 1)).sum().backward()
        optimizer.step()

def grouped(rank, world, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    train(rank)
    dist.destroy_process_group()
"""
GROUPED = """
if __name__ == "__main__":
    mp.spawn(grouped, args=(2, os.path.abspath("meeting")), nprocs=2)
    print("done")
"""
ALONE = """
if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
    mp.spawn(train, nprocs=1)
    train(0)
"""
RANKS = """
import os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""
ACCELERATED = """
import torch
from accelerate import Accelerator
from torch import nn
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(2, 4) * (accelerator.process_index + 1)).sum())
    optimizer.step()
"""


def test_processes_of_spawn_are_ranks(scripts):
    """Children of `mp.spawn` record as ranks of the run, under the model's own name, and one of them speaks."""
    done, run = scripts.observe(SPAWN + GROUPED)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert run.ranks == [0, 1] and run.steps == [0, 1, 2]
    assert run.info["model"]["class"] == "Sequential"
    said = ours(done)
    assert said[0].startswith("Sequential: 3 steps") and len(said) == 3
    assert said[-1].startswith("2 processes started by torch.multiprocessing (spawn)")


@pytest.mark.thorough
def test_processes_of_spawn_without_a_group_are_ranks_too(scripts):
    """They join one run by the index that their function is told; a second spawn and the parent have runs beside it."""
    done, run = scripts.observe(SPAWN + ALONE, "--watch", "recommended", process=True)
    assert done.returncode == 0, done.stderr
    assert run.ranks == [0, 1] and run.steps == [0, 1, 2]
    means = {record.rank: record["mean"] for record in run.records(steps=0) if str(record.place) == ":output"}
    assert len(set(means.values())) == 2
    assert "replicas_differ" not in {finding.rule for finding in run.findings()}
    assert "no process group" in run.findings().skipped["replicas_differ"]
    for name in ("run-2", "run-parent"):
        assert tt.open(scripts.folder / name).ranks == [0] and tt.open(scripts.folder / name).steps == [0, 1, 2]
    assert sorted(path.name for path in scripts.folder.glob("run*")) == ["run", "run-2", "run-parent"]


def test_the_index_of_a_spawned_process(scripts):
    """A process that `mp.spawn` started is the rank that its function is told, other processes are none."""
    text = """
        import multiprocessing, torch
        from torch.multiprocessing.spawn import _wrap
        from tensortap.adapters.lookup import world_now

        def work(index):
            print(index, *world_now(), flush=True)

        for target, args in ((_wrap, (work, 1, (), "errors")), (work, (3,))):
            process = multiprocessing.get_context("fork").Process(target=target, args=args)
            process.start()
            process.join()
        """
    done = scripts.warm.run([scripts.write(text)], scripts.folder, env={SPAWNED: "2"})
    assert done.stdout == "1 1 2 True\n3 0 1 False\n", done.stderr


@pytest.mark.parametrize("words", [["torchrun"], ["accelerate", "launch"], ["-m", "accelerate.commands.launch"]])
def test_what_a_launcher_is_given(scripts, words):
    """A launcher runs unwatched, named as in a terminal, and what it starts finds the run and its options."""
    text = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), 'torch' in sys.modules]))"
    place = scripts.folder / "accelerate" / "commands" if words[0] == "-m" else scripts.folder / "bin"
    place.mkdir(parents=True)
    for folder in (place, place.parent) if words[0] == "-m" else ():
        (folder / "__init__.py").touch()
    command = place / ("launch.py" if words[0] == "-m" else words[0])
    command.write_text(f"#!{sys.executable}\n{text}\n")
    command.chmod(0o755)
    path = f"{scripts.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = scripts.command("run", "--to", "run", "--every", "2", *words, "train.py", PATH=path)
    assert done.returncode == 0, done.stderr
    arguments, environment, loaded = json.loads(done.stdout)
    assert arguments == [*(words[1:] if words[0] == "accelerate" else []), "train.py"] and not loaded
    assert environment["TENSORTAP"] == str(scripts.folder / "run")
    assert json.loads(environment["TENSORTAP_OPTIONS"])["every"] == 2
    assert environment["PYTHONPATH"].split(os.pathsep)[0].endswith("startup")
    assert ours(done) == []


LAUNCHERS = {
    "torchrun, named": ["run", "--to", "run", "torchrun", "--standalone", "--nproc-per-node=2"],
    "torchrun, a module": ["run", "--to", "run", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "torchrun first": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tensortap", "run",
                       "--to", "run"],
    "accelerate launch": ["run", "--to", "run", "accelerate", "launch", "--num_processes=2", "--multi_gpu",
                          "--mixed_precision=no", "--num_machines=1", "--dynamo_backend=no"],
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("words", LAUNCHERS.values(), ids=LAUNCHERS)
def test_two_workers_of_a_launcher(scripts, words):
    """Every worker that torchrun or `accelerate launch` starts is a rank of the one run, and the first one speaks."""
    name = scripts.write(ACCELERATED if "accelerate" in words else RANKS)
    first = [] if words[0] == "-m" else ["-m", "tensortap"]
    bin = os.path.dirname(sys.executable)  # noqa: PTH120
    done = scripts.python(*first, *words, name, PATH=f"{bin}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    run = tt.open(scripts.folder / "run")
    assert run.ranks == [0, 1] and run.steps == [0, 1, 2] and run.state == "finished"
    means = {record.rank: record["mean"] for record in run.records(steps=0) if str(record.place) == ":output"}
    assert len(set(means.values())) == 2
    assert sum(line.startswith("Sequential: 3 steps") for line in ours(done)) == 1


def test_a_module_that_trains(scripts):
    """`tensortap run -m package.train` records what the module trains, and the run has the module's name."""
    (scripts.folder / "package").mkdir()
    scripts.write("", "package/__init__.py")
    scripts.write(TRAIN, "package/train.py")
    done = scripts.command("run", "-m", "package.train")
    assert done.returncode == 0, done.stderr
    (path,) = (scripts.folder / "runs").iterdir()
    assert path.name.endswith("-package.train") and tt.open(path).steps == [0, 1, 2]


def test_by_environment(scripts, tmp_path):
    """With the line that `tensortap env` prints, TENSORTAP records a process; without TENSORTAP nothing is loaded."""
    printed = scripts.command("env").stdout
    path = shlex.split(printed.removeprefix("export PYTHONPATH="))[0]
    check = "import sys; sys.exit('tensortap' in sys.modules)"
    env = {**os.environ, "PYTHONPATH": path}
    assert subprocess.run([sys.executable, "-c", check], env=env, timeout=300).returncode == 0
    env |= {"TENSORTAP": "run", "TENSORTAP_OPTIONS": '{"every": 2}', "OMP_NUM_THREADS": "1"}
    command = [sys.executable, scripts.write(BY_HAND + "raise KeyError")]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    run = tt.open(tmp_path / "run")
    assert run.steps == [0, 2] and done.returncode == 1
    assert "ended_by" in (tmp_path / "run" / "rank=0" / "_rank.json").read_text()


@pytest.mark.thorough
def test_other_frameworks_by_environment(scripts):
    """TENSORTAP records compiled steps of JAX too."""
    text = """
        import jax, jax.numpy as jnp

        @jax.jit
        def step(params, x):
            loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

        params = {"w": jnp.ones((4, 2))}
        for i in range(5):
            params, loss = step(params, jnp.full((3, 4), float(i + 1)))
        """
    done = scripts.python(scripts.write(text), TENSORTAP="run", PYTHONPATH=python_path())
    assert done.returncode == 0, done.stderr
    assert tt.open(scripts.folder / "run").steps, done.stderr


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


CELLS = f"""
%load_ext tensortap
{TRAIN.strip()}
print("trained")
%unload_ext tensortap
"""


def test_cells_of_ipython(scripts):
    """IPython's own magic loads and unloads the extension, and cells between are recorded with the model's name."""
    pytest.importorskip("IPython")
    text = f"""
        import os
        os.environ["IPYTHONDIR"] = os.path.abspath("profile")
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        for cell in {[["%load_ext tensortap"], [TRAIN], ["print('trained')"], ["%unload_ext tensortap"]]!r}:
            shell.run_cell(cell[0], store_history=True).raise_error()
        """
    done = scripts.warm.run([scripts.write(text)], scripts.folder)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    _check_notebook(scripts, done)


@pytest.mark.thorough
@pytest.mark.parametrize("unloaded", [True, False])
def test_a_process_of_ipython(scripts, unloaded):
    """The same in the program `ipython`; without `%unload_ext` the run is closed when the process ends."""
    pytest.importorskip("IPython")
    cells = CELLS if unloaded else CELLS.replace("%unload_ext tensortap", "")
    name = scripts.write(cells, "cells.ipy")
    path = os.pathsep.join([SOURCE, *filter(None, sys.path)])
    done = scripts.python("-m", "IPython", "--no-banner", name, PYTHONPATH=path, IPYTHONDIR="profile")
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    _check_notebook(scripts, done)


def _check_notebook(scripts, done):
    (path,) = [path for path in (scripts.folder / "runs").iterdir() if path.is_dir()]
    run = tt.open(path)
    assert (run.steps, run.state) == ([0, 1, 2], "finished")
    assert any(line.startswith("Sequential: 3 steps") for line in ours(done)), done.stderr
