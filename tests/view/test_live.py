"""`tensortap show --live`: a run drawn as it grows; and files of tensors."""

import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console, Group
from safetensors.numpy import save_file

import tensortap as tt
from tensortap.cli import cli
from tensortap.reduce.reducers import stats
from tensortap.view.terminal.live import draw_until, follow, frame
from tensortap.view.terminal.screen import Screen

X = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)


def drawn(run, width, height, asked=None, note=""):
    """A picture as lines of text."""
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False, markup=False)
    console.print(Group(*frame(run, asked, "worst", (width, height), note)))
    return console.file.getvalue().splitlines()


@pytest.fixture
def many(make_run):
    """Three steps of forty sites."""
    return tt.open(make_run([({f"layers.{i}.mlp": X * i for i in range(40)}, {"loss": 1 / (n + 1)}) for n in range(3)]))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 50), (40, 16)])
def test_it_fits(many, width, height):
    """Whatever the terminal's size, no line is longer, there are no more lines, and what has no room is counted."""
    lines = drawn(many, width, height, note="q ends this")
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert any("more sites" in line for line in lines) == (height < 40)
    assert any(line.startswith("loss 0.333 ") for line in lines)


def test_a_wide_terminal_shows_more(many):
    """On 140 columns there is room for the way over steps, which 80 do not have."""
    assert "over steps" in "\n".join(drawn(many, 140, 30))
    assert "dtype" in "\n".join(drawn(many, 140, 30))
    assert "dtype" not in "\n".join(drawn(many, 60, 30))


def test_a_long_run(make_run):
    """Of a long run the newest steps are drawn, and the others are spoken of."""
    run = tt.open(make_run([({"fc": X[0, :2]}, {"loss": float("nan")}) for _ in range(300)], keep=stats()))
    lines = "\n".join(drawn(run, 100, 30))
    assert "256 steps (44–299)" in lines and "44 earlier ones are not in this view" in lines
    assert "loss nan !" in lines


def test_nothing_yet(make_run):
    """A run without records, or without the site asked for, is no error: it may come."""
    empty = tt.open(make_run([], name="empty"))
    assert "no records yet" in drawn(empty, 200, 24)[0]
    some = tt.open(make_run([({"fc": X}, {})], name="some"))
    assert "no records yet" in drawn(some, 200, 24, asked=["later"])[0]


class Script:
    """Keys that are pressed one after the other; notes how long each was waited for."""

    def __init__(self, *keys):
        self.keys, self.waited = list(keys), []

    def pressed(self, seconds):
        self.waited.append(seconds)
        return self.keys.pop(0)


def test_until_q(tmp_path):
    """It is drawn again and again until `q`; a slow picture is drawn more seldom, so that the training has its core."""
    with tt.watch(to=str(tmp_path / "run")) as tap:
        tt.tap(X, "fc")
        tap.step()
        pictures, times = [], iter([0.0, 0.01, 1.0, 1.5, 6.0, 6.01])
        keys = Script("", "x", "q")
        draw_until(tap.run, lambda: pictures.append(1), keys, lambda: next(times))
    assert len(pictures) == 3
    assert keys.waited == pytest.approx([1.0, 4.5, 1.0])


def test_until_the_end(many):
    """A run that is over is drawn once, with everything in it."""
    pictures = []
    draw_until(many, lambda: pictures.append(1), Script())
    assert pictures == [1]


def test_finished_or_piped(many, tmp_path):
    """Over a finished run, and into a pipe, it is an ordinary picture."""
    stream = io.StringIO()
    follow(many, screen=Screen(stream))
    assert stream.getvalue().count("layers.0.mlp:output") == 1
    done = CliRunner().invoke(cli, ["show", "--live", str(many.path)])
    assert done.exit_code == 0
    assert "\x1b" not in done.output and done.output.count("· finished ·") == 1


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *words):
        self.master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color"}
        words = [sys.executable, "-m", "tensortap", *words]
        self.process = subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=env)
        os.close(slave)
        self.seen = b""

    def until(self, text):
        """Read until a text is there."""
        deadline = time.monotonic() + 60
        while text.encode() not in self.seen:
            assert select.select([self.master], [], [], 60)[0] and time.monotonic() < deadline, self.seen
            try:
                self.seen += os.read(self.master, 65536)
            except OSError:
                break
        return text.encode() in self.seen

    def end(self, how):
        """Press `q` or Ctrl-C, and read to the end; the exit code."""
        if how == "q":
            os.write(self.master, b"q")
        else:
            self.process.send_signal(signal.SIGINT)
        try:
            self.until("\0")
            return self.process.wait(60)
        finally:
            self.process.kill()
            os.close(self.master)


@pytest.mark.parametrize("how", ["q", pytest.param("ctrl-c", marks=pytest.mark.thorough)])
def test_beside_a_training(tmp_path, how):
    """New steps appear while another process writes them; `q` and Ctrl-C end it quietly and leave the last picture."""
    with tt.watch(to=str(tmp_path / "run")) as tap:
        tt.tap(X, "fc")
        tap.step()
        terminal = Terminal("show", "--live", str(tmp_path / "run"))
        assert terminal.until("1 step (0)")
        tt.tap(X, "head")
        tap.step()
        assert terminal.until("2 steps (0–1)")
        assert terminal.end(how) == 0
    last = terminal.seen.rpartition(b"\x1b[?1049l")[2].decode()
    assert "head:output" in last and "Traceback" not in last


def test_files_of_tensors(tmp_path):
    """`show` makes a file of tensors readable: one closely, several a line each, or as JSON."""
    np.save(tmp_path / "x.npy", X)
    np.savez(tmp_path / "two.npz", a=X, b=np.array([np.nan, 1.0]))
    save_file({"w": X, "v": X[0]}, tmp_path / "model.safetensors")
    names = ("x.npy", "two.npz", "model.safetensors")
    one, two, three = (CliRunner().invoke(cli, ["show", str(tmp_path / name)]).output for name in names)
    assert "x.npy\nnumpy.ndarray [4,32] f32" in one
    assert "nan 1" in two.splitlines()[1]
    assert sorted(line.split()[0] for line in three.splitlines()) == ["v", "w"]
    found = json.loads(CliRunner().invoke(cli, ["show", str(tmp_path / "two.npz"), "--json"]).output)
    assert (found["b"]["nan"], found["b"]["mean"]) == (1, 1.0)
