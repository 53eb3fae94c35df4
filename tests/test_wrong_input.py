"""Wrong input: each is named with what was expected and the call that works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import tensortap as tt
from tensortap.cli.app import cli
from tensortap.errors import ProbeError, RunError, TensortapError, UnsupportedError
from tensortap.view.terminal.show import draw, read_view


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def _meta_net() -> nn.Sequential:
    with torch.device("meta"):
        return _net()


X = torch.ones(2, 4)


# Models, classes and runs in each other's place


def test_models_given_to_diff_are_sent_to_compare() -> None:
    """`tt.diff` of models, which compares runs, names `tt.compare` with a batch."""
    with pytest.raises(UnsupportedError, match=r"must be .*, got a Sequential.*tt\.compare\(a, b, batch\)"):
        tt.diff(_net(), _net())


@pytest.mark.parametrize("ask", [tt.open, lambda given: tt.open("x").findings(reference=given), tt.findings])
def test_what_is_no_path_is_no_run(ask, tmp_path, monkeypatch) -> None:
    """Whatever takes a run says that it must be a path, and of a tap how to come to its run."""
    monkeypatch.chdir(tmp_path)
    with tt.watch(to="x") as tap:
        tt.tap(np.ones(2), "x")
    with pytest.raises(UnsupportedError, match=r"a run must be the path of its folder, got a Sequential"):
        ask(_net())
    with pytest.raises(UnsupportedError, match=r"got a Tap: write tap\.run"):
        ask(tap)


def test_runs_given_to_compare_are_sent_to_diff() -> None:
    """`tt.compare` of paths, which calls models, names `tt.diff`."""
    with pytest.raises(UnsupportedError, match=r"got 'runs/a'.*tt\.diff\('runs/a', 'runs/b'\)"):
        tt.compare("runs/a", "runs/b", X)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: tt.watch(nn.Linear),
        lambda: tt.sites(nn.Linear),
        lambda: tt.capture(nn.Linear, X, "0"),
        lambda: tt.verify(nn.Linear, X),
        lambda: tt.locate_nonfinite(nn.Linear, X),
        lambda: tt.check_model(nn.Linear, X),
        lambda: tt.compare(_net(), nn.Linear, X),
    ],
)
def test_a_class_is_no_model(ask) -> None:
    """A class in the place of a model is answered with how to make an instance."""
    with pytest.raises(UnsupportedError, match=r"must be an object, got the class Linear\. .*: Linear\(\.\.\.\)"):
        ask()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: torch.optim.SGD(_net().parameters(), 0.1), "an optimizer.*watch the model"),
        (lambda: _net().state_dict(), "tensors without a model.*watch the model"),
    ],
)
def test_what_belongs_to_a_model_is_no_model(given, said) -> None:
    """An optimizer or a state dict is answered with the model they belong to."""
    with pytest.raises(UnsupportedError, match=said):
        tt.watch(given())


def test_none_is_no_model(tmp_path) -> None:
    """A model that is None by mistake is refused; `tt.watch()` without one records named values."""
    with pytest.raises(ProbeError, match=r"must be a model, got None.*tt\.watch\(to='runs/exp1'\)"):
        tt.watch(None, to=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ProbeError, match="must be a model, got None"):
        tt.watch(model=None)


def test_a_class_is_a_pattern(tmp_path) -> None:
    """`tt.watch(model, nn.Linear)` watches the layers of that class, as a probe of it does."""
    model = _net()
    with tt.watch(model, nn.Linear, to=tmp_path / "run") as tap:
        model(X)
    assert tap.run.sites == ["0:output"]


# Calls inside a step


@pytest.mark.parametrize(
    ("given", "write"),
    [
        ((torch.ones(()),), r"got a Tensor: write tap\.step\(loss=loss\)"),
        (({"loss": 1.0, "acc": 0.5},), r"got a dict: write tap\.step\(\*\*metrics\)"),
        ((3, 0.5), r"got an int and 1 more: write tap\.step\(loss=loss\)"),
    ],
)
def test_metrics_have_names(given, write) -> None:
    """A metric without a name is answered with the call that names it."""
    with tt.watch(to=tt.Memory()) as tap, pytest.raises(TypeError, match=rf"must be named, {write}"):
        tap.step(*given)


def test_swapped_arguments_of_tap() -> None:
    """`tt.tap("name", x)` while somebody watches is warned of with the right order; with `strict` it raises."""
    expected = r"the name of a tapped value must be text, got a Tensor: write tap\(x, 'name'\)"
    with tt.watch(to=tt.Memory()) as tap, pytest.warns(tt.TensortapWarning, match=expected):
        tt.tap("name", X)
    assert tap.counts["skipped_values"] == 1
    with pytest.warns(tt.TensortapWarning), tt.watch(to=tt.Memory(), strict=True), pytest.raises(TensortapError):
        tt.tap("name", X)


# Folders that cannot be written


@pytest.fixture
def unwritable(tmp_path) -> list[tuple[str, str]]:
    """Paths at which no folder can be made, each with the reason."""
    (tmp_path / "file.py").write_text("x = 1\n")
    below_file = (f"{tmp_path}/file.py/run", rf"{tmp_path}/file\.py is a file")
    return [below_file, *([("/proc/zz/r", "no folder can be made in /proc")] if Path("/proc/self").exists() else [])]


def test_a_folder_that_cannot_be_made_is_named(unwritable) -> None:
    """`tt.watch(to=...)` names the folder and the reason, and raises an error of ours."""
    for path, why in unwritable:
        with pytest.raises(RunError, match=rf"{path}' cannot be written: {why}.*to='runs/exp1'"):
            tt.watch(to=path)


def test_run_refuses_a_folder_before_the_script_starts(unwritable, tmp_path) -> None:
    """`tensortap run --to` ends with an error and without running the script; nothing is left behind."""
    script = tmp_path / "train.py"
    script.write_text("print('started')\n")
    for path, why in unwritable:
        done = _tensortap("run", "--to", path, str(script))
        assert (done.returncode, done.stdout) == (1, "")
        assert f"'{path}' cannot be written: {why}".replace("\\", "") in done.stderr
        assert "no model was seen" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.py", "train.py"]


def test_run_checks_the_default_folder_too(tmp_path) -> None:
    """Without `--to` the folder `runs` is checked, where a file of that name may lie."""
    (tmp_path / "runs").write_text("")
    (tmp_path / "train.py").write_text("print('started')\n")
    done = _tensortap("run", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "") and "runs is a file" in done.stderr


def test_run_leaves_nothing_where_it_checked(tmp_path) -> None:
    """The check of a folder that can be made leaves none, for the script may have no model."""
    (tmp_path / "train.py").write_text("print('started')\n")
    done = _tensortap("run", "--to", "deep/down/run", "train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "started\n")
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_run_that_could_not_be_opened_saw_a_model(tmp_path) -> None:
    """Where the folder is taken by a file while the script runs, nobody says that no model was seen."""
    (tmp_path / "train.py").write_text(
        "import pathlib, torch\n"
        "pathlib.Path('taken').write_text('')\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2))\nprint('over')\n"
    )
    done = _tensortap("run", "--to", "taken", "train.py", cwd=tmp_path)
    assert done.stdout == "over\n" and "is a file; a run is a folder" in done.stderr
    assert "no model was seen" not in done.stderr and "nothing was kept" in done.stderr


def _tensortap(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tensortap", *args], cwd=cwd, text=True, capture_output=True, timeout=120, check=False
    )


# Tensors without values


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, x: tt.verify(model, x, repeats=1),
        tt.locate_nonfinite,
        tt.check_model,
        tt.rank_samples,
        lambda model, x: tt.compare(model, model, x),
    ],
)
def test_a_model_without_values_cannot_be_judged(ask) -> None:
    """What needs values says that a meta tensor has none, of a model and of a batch."""
    for model, x in ((_meta_net(), X.to("meta")), (_net(), X.to("meta")), (_net(), {"input": X.to("meta")})):
        with pytest.raises(
            UnsupportedError, match=r"a meta tensor has a shape but no values; .* once it is on a device"
        ):
            ask(model, x)


def test_show_has_dashes_where_there_are_no_values(tmp_path, capsys) -> None:
    """`tensortap show` prints dashes, not NaN, for tensors that have a shape but no values."""
    model = _meta_net()
    with tt.watch(model, to=tmp_path / "run") as tap:
        model(X.to("meta"))
        tap.step()
    for view in (read_view(tap.run), read_view(tap.run, ["0"])):
        draw(view)
        (row,) = [line for line in capsys.readouterr().out.splitlines() if "[2,4]" in line][:1]
        assert "nan" not in row and row.split().count("–") == 6  # nan/inf, mean, std, min, max and zeros


# Names that are nearly right


def test_a_site_that_is_nearly_right(tmp_path) -> None:
    """A misspelt site of a run is answered with the nearest one, as the command does."""
    model = nn.ModuleDict({"head": nn.Linear(4, 2)})
    with tt.watch(model, "head", "head:input", to=tmp_path / "run") as tap:
        model["head"](X)
        tap.step()
    for ask in (lambda: tap.run.series("hed", "std"), lambda: tap.run.tensor("hed", 0)):
        with pytest.raises(RunError, match="Did you mean 'head'"):
            ask()


def test_a_command_that_is_nearly_right() -> None:
    """A misspelt command is answered with the nearest one, and one that is far off with the list."""
    done = CliRunner().invoke(cli, ["chek", "runs/x"])
    assert done.exit_code == 2 and "No such command 'chek'. Did you mean 'check'?" in done.output
    assert "Did you mean" not in CliRunner().invoke(cli, ["qqqqqq"]).output


@pytest.mark.parametrize("command", [["report", "-o", "x.html"], ["view"], ["mcp"], ["show"]])
def test_a_folder_that_is_missing(command, tmp_path, monkeypatch) -> None:
    """Every command that is given a missing folder says that it is missing."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [command[0], "runs/nope", *command[1:]])
    assert done.exit_code in (1, 2) and "'runs/nope': no such folder" in done.output
