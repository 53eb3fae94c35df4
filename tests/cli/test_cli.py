"""The command: output, errors and exit codes, as a user meets them."""

import csv
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import tensortap
from tensortap.cli import cli
from tensortap.cli import show as show_command
from tensortap.cli.registry import COMMANDS, load_command
from tensortap.reduce.reducers import full, histogram, sample
from tensortap.sinks.npy import load_npy

X = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
BAD = np.where(X > 2, np.nan, X)


@pytest.fixture
def run(make_run):
    steps = [
        ({"blocks.0.mlp": X, "blocks.1.mlp": BAD if n else X, "head": X * n}, {"loss": 1.0 / (n + 1)}) for n in range(6)
    ]
    return make_run(steps, keep=[histogram(), full(), sample(3)])


def call(*args, **more):
    return CliRunner().invoke(cli, [str(a) for a in args], **more)


def environment(**more):
    source = str(Path(tensortap.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": source, "PYTHONWARNINGS": "default", **more}


def spawn(*args, **more):
    command = [sys.executable, "-m", "tensortap", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(**more))


def on_terminal(width, *args, **more):
    """Run the command on a pseudo-terminal of a given width; what it drew, and its exit code."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    env = environment(TERM="xterm-256color", **more)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR"):
        if name not in more:
            env.pop(name, None)
    command = [sys.executable, "-m", "tensortap", *map(str, args)]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    drawn = b""
    while True:
        try:
            piece = os.read(master, 65536)
        except OSError:
            break
        if not piece:
            break
        drawn += piece
    os.close(master)
    return drawn.decode(), process.wait(timeout=60)


def test_show(run):
    """The worst site is the first row."""
    result = call("show", run)
    assert result.exit_code == 0, result.output
    assert "NaN or Inf" in result.output
    rows = result.output.splitlines()
    assert rows[next(i for i, r in enumerate(rows) if r.startswith("site")) + 1].startswith("blocks.1.mlp:output")


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.thorough), 200])
def test_show_fits_a_real_terminal_and_is_coloured_there(run, width):
    """On a terminal NaN is red, and no line is wider than it."""
    drawn, code = on_terminal(width, "show", run)
    assert code == 0, drawn
    assert "\x1b[1;31m" in drawn
    plain = click.unstyle(drawn).replace("\r\n", "\n").splitlines()
    assert max(map(len, plain)) <= width
    assert any(line.startswith("blocks.1.mlp:output") for line in plain)


def test_no_color_is_honoured(run):
    """NO_COLOR takes the colours away, COLUMNS sets the width."""
    drawn, code = on_terminal(200, "show", run, NO_COLOR="1", COLUMNS="90")
    assert code == 0
    assert "31m" not in drawn
    assert max(len(line) for line in click.unstyle(drawn).splitlines()) <= 90


def test_piped_output_is_plain(run):
    """Nothing coloured when not a terminal; stderr stays empty."""
    result = spawn("show", run)
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def test_a_minus_survives_a_terminal_without_unicode(run):
    """Numbers keep their sign where only ASCII can be written."""
    result = spawn("show", run, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert re.search(r" -\d", result.stdout)


@pytest.mark.parametrize("args", [["show"], ["show", "--site", "head"], ["show", "--step", "2"]])
def test_json_is_strict(run, args):
    """`--json` prints JSON and nothing else."""

    def refuse(token):
        raise AssertionError(token)

    result = call(*args, run, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout, parse_constant=refuse)["path"] == run


@pytest.mark.parametrize(("step", "last"), [("2", 2), ("-1", 5), ("1:3", 2), (":2", 1), ("4:", 5)])
def test_steps(run, step, last):
    """A number, the last, a range, a range open at either end."""
    result = call("show", run, "--json", "--step", step)
    assert json.loads(result.stdout)["steps"]["last"] == last


def test_export_csv_and_jsonl(run, tmp_path):
    """All records, or the chosen ones, in both formats."""
    result = call("export", run, "--to", "csv", "-o", tmp_path / "a.csv")
    assert result.exit_code == 0, result.output
    assert result.output == f"{tmp_path / 'a.csv'}: 18 records written\n"
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["step"] for r in rows[:4]] == ["0", "0", "0", "1"]
    result = call(
        "export", run, "--to", "jsonl", "-o", tmp_path / "a.jsonl", "--site", "head", "--step", "2:4", "--json"
    )
    assert json.loads(result.stdout) == {"path": str(tmp_path / "a.jsonl"), "records": 2, "tensors": 0}
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [(r["step"], r["site"]) for r in lines] == [(2, "head"), (3, "head")]
    assert sum(lines[0]["hist_counts"]) == X.size


def test_export_npy(run, tmp_path):
    """Every kept tensor, with its place in the index."""
    result = call("export", run, "--to", "npy", "-o", tmp_path / "npy", "--site", "head")
    assert result.exit_code == 0, result.output
    found = {(e.step, e.kind): array for e, array in load_npy(tmp_path / "npy").items()}
    assert len(found) == 12
    np.testing.assert_array_equal(found[5, "full"], X * 5)


def test_export_in_several_readings_is_the_same(run, tmp_path, monkeypatch):
    """However few rows are read at a time, every record is written once and in order."""
    call("export", run, "--to", "jsonl", "-o", tmp_path / "whole")
    monkeypatch.setattr("tensortap.sinks.export._ROWS", 4)
    call("export", run, "--to", "jsonl", "-o", tmp_path / "parts")
    assert (tmp_path / "whole").read_text() == (tmp_path / "parts").read_text() != ""


def test_export_overwrites_only_when_told(run, tmp_path):
    """What is there stays there; the error says how to replace it; a foreign folder is never replaced."""
    target = tmp_path / "a.csv"
    target.write_text("mine")
    result = call("export", run, "--to", "csv", "-o", target)
    assert result.exit_code == 1
    assert "--overwrite" in result.stderr and target.read_text() == "mine"
    assert call("export", run, "--to", "csv", "-o", target, "--overwrite").exit_code == 0
    assert target.read_text() != "mine"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").touch()
    result = call("export", run, "--to", "npy", "-o", tmp_path / "folder", "--overwrite")
    assert result.exit_code == 1
    assert (tmp_path / "folder" / "thesis.tex").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.csv", "folder", "run"]


def test_compact(run):
    """Says what it did, and the run reads the same afterwards."""
    before = json.loads(call("show", run, "--json").stdout)["rows"]
    result = call("compact", run)
    assert result.exit_code == 0, result.output
    assert "18 rows" in result.output and "→" in result.output
    assert json.loads(call("compact", run, "--json").stdout)["rows"] == 18
    assert json.loads(call("show", run, "--json").stdout)["rows"] == before


def test_doctor():
    """Names the kernel, versions, frameworks and how to get what is missing."""
    result = call("doctor")
    assert result.exit_code == 0, result.output
    for word in ("kernel", "active", "python", "numpy", "torch", "duckdb", "what can be seen", ":grad_output"):
        assert word in result.output
    found = json.loads(call("doctor", "--json").stdout)
    assert set(found) == {"kernel", "versions", "frameworks", "extras", "capabilities", "advice"}
    assert found["capabilities"]["torch"]["output"] is True and "graph" in found["capabilities"]["numpy"]["grad_output"]


def test_doctor_without_the_c_kernel():
    """Where NumPy reduces, it says so, and that it does with one thread."""
    script = "from tensortap.cli import doctor; print([c.found for c in doctor.checks() if c.group == 'kernel'])"
    env = environment(TENSORTAP_KERNEL="numpy")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert done.stdout.startswith("['numpy', '1 of "), done.stderr


def test_doctor_imports_no_framework():
    """Frameworks are found without being loaded."""
    script = (
        "import sys; from tensortap.cli import doctor; doctor.checks(); "
        "print([m for m in ('torch','tensorflow','jax','keras','sklearn','onnxruntime') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert done.stdout.strip() == "[]", done.stderr


def test_help_loads_nothing_heavy():
    """`--help` needs neither pyarrow nor rich."""
    script = (
        "import sys, tensortap.cli; before = set(sys.modules)\n"
        "try: tensortap.cli.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('pyarrow','rich','duckdb') if m in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment())
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["show", "{tmp}/nothing"], 1, "nothing"),
        (["show", "{run}", "--site", "blocks.0.mpl"], 1, "blocks.0.mlp"),
        (["show", "{run}", "--step", "77"], 1, "--step"),
        (["show", "{run}", "--step", "x"], 2, "10:20"),
        (["show", "{run}", "--sort", "wurst"], 2, "worst"),
        (["show"], 2, "RUN"),
        (["export", "{run}", "--to", "xml", "-o", "x"], 2, "csv"),
        (["export", "{run}", "--to", "csv", "-o", "{tmp}/a", "--site", "haed"], 1, "head"),
        (["compact", "{tmp}/nothing"], 1, "nothing"),
        (["shwo", "{run}"], 2, "shwo"),
    ],
)
def test_errors_are_short_and_name_what_would_work(run, tmp_path, args, code, said):
    """No traceback, one or two lines on stderr, the right exit code, nothing on stdout."""
    result = call(*(a.format(run=run, tmp=tmp_path) for a in args))
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert not list(tmp_path.glob(".*partial*"))


def test_an_unexpected_error_is_short_too(run, monkeypatch):
    """Exit 70, and how to see the traceback; with TENSORTAP_DEBUG=1 it is there."""

    def broken(path):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(show_command, "open_run", broken)
    monkeypatch.delenv("TENSORTAP_DEBUG", raising=False)
    result = call("show", run)
    assert result.exit_code == 70
    assert result.stderr == (
        "unexpected error: ZeroDivisionError: oops\nrun with TENSORTAP_DEBUG=1 for the traceback\n"
    )
    monkeypatch.setenv("TENSORTAP_DEBUG", "1")
    result = call("show", run)
    assert result.exit_code == 70
    assert "Traceback" in result.stderr


def test_ctrl_c_is_130(run, monkeypatch):
    """Interrupted is interrupted, without a traceback."""

    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(show_command, "open_run", interrupted)
    result = call("show", run)
    assert result.exit_code == 128 + signal.SIGINT
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "args",
    [
        ["show"],
        *(pytest.param(["show", *more], marks=pytest.mark.thorough) for more in (["--json"], ["--site", "head"])),
    ],
)
def test_a_closed_pipe_is_quiet(run, args):
    """With nobody reading, the command ends without a complaint, as if by SIGPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tensortap", *args, run]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment())
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("name", COMMANDS)
def test_the_registry_says_what_each_command_says(name):
    """The line in the registry is the first line of the command's own help, and its file has its name."""
    command = load_command(name)
    assert command.name == name
    assert command.help.splitlines()[0] == COMMANDS[name]


def test_version_and_module_entry():
    """`python -m tensortap` is the command; its version is the package's."""
    assert call("--version").output == f"tensortap {tensortap.__version__}\n"
    result = spawn("--help")
    assert result.returncode == 0
    for name in ("show", "export", "compact", "doctor"):
        assert name in result.stdout


def test_the_story_is_wrapped(run, monkeypatch):
    """`explain` breaks its lines at the terminal's width, 80 columns without one, and keeps their indent."""
    monkeypatch.delenv("COLUMNS", raising=False)
    said = call("explain", run).output
    lines = said.splitlines()
    assert all(len(line) <= 80 for line in lines if " " in line.strip() and str(run) not in line)
    narrow = call("explain", run, env={"COLUMNS": "50"}).output
    assert len(narrow.splitlines()) > len(lines) and narrow.split() == said.split()
    first = next(i for i, line in enumerate(lines) if line.startswith("1. "))
    assert all(line.startswith("   ") or re.match(r"\d+\. ", line) for line in lines[first:])


def test_a_rule_that_does_not_exist_and_one_step(make_run):
    """`check` lists the rules in lines of 80 columns, the nearest first; a run of one step has 1 step."""
    path = make_run([({"head": X}, {})])
    done = call("check", path, "--rule", "loss_spikes")
    names = done.stderr.split("There are:\n")[1]
    assert done.exit_code == 2 and "Did you mean 'loss_spike'" in done.stderr
    assert names.startswith("  loss_spike, ") and all(len(line) <= 80 for line in names.splitlines())
    assert " 1 step " in call("check", path).stdout
