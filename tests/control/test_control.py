"""A running tap is asked for more by other processes, and nothing they send reaches the training."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import tensortap as tt
from tensortap.cli import cli
from tensortap.control import listener
from tensortap.control.client import ask, can_control, live_sockets
from tensortap.control.paths import LONGEST, SOCKET
from tensortap.control.requests import ControlRequest
from tensortap.errors import ControlError

TRAIN = """
import sys, time
import numpy as np, tensortap as tt
class Dense:
    def __init__(self, n, m): self.w = np.full((n, m), 0.1, np.float32)
    def __call__(self, x): return x @ self.w
class Net:
    def __init__(self): self.first, self.second = Dense(4, 8), Dense(8, 2)
    def __call__(self, x): return self.second(self.first(x))
net = Net()
with tt.watch(net, "first", to=sys.argv[1]) as tap:
    print("ready", flush=True)
    for step in range(100_000):
        net(np.full((3, 4), step, np.float32))
        tap.step(loss=1.0 / (step + 1))
        time.sleep(0.005)
"""


GARBAGE = (
    b"\xff\x00garbage\n",
    b"[1]\n",
    b"{}\n",
    b"",
    b"[" * 60_000,
    b'{"action": "capture", "sites": 7}\n',
    b'{"action": "capture", "sites": ["a"], "steps": 1e400}\n',
    b'{"action": "x", "evil": 1}\n',
)


class Net:
    """Two layers; the second is not watched at first."""

    def __init__(self):
        self.first, self.second = Double(), Double()

    def __call__(self, x):
        return self.second(self.first(x))


class Double:
    def __call__(self, x):
        return 2 * x


@contextmanager
def training(path, *sites, meeting=None, **options):
    """Train in a thread until the block ends, step by step with others where there is a meeting; the tap."""
    model, over = Net(), threading.Event()
    with tt.watch(model, *(sites or ("first",)), to=path, **options) as tap:

        def loop():
            while not over.is_set():
                with suppress(threading.BrokenBarrierError):
                    meeting and meeting.wait(20)
                model(np.ones(4))
                tap.step(loss=0.5)
                time.sleep(0.001)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield tap
        finally:
            over.set()
            if meeting is not None:
                meeting.abort()
            thread.join()


def request(action, **more):
    return ControlRequest(action=action, **more)


def one(path, action, **more):
    (answer,) = ask(path, request(action, **more))
    return answer


def until(path, name):
    """Wait for an event of this name; its step and data."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for event in tt.open(path).events().to_pylist():
            if event["kind"] == "control" and event["name"] == name:
                return event["step"], json.loads(event["data"])
        time.sleep(0.02)
    raise AssertionError(f"no event {name!r}")


def test_capture(tmp_path):
    """A capture acts at the next step, for as many steps as asked; who asked for what is an event."""
    path = tmp_path / "run"
    with training(path) as tap:
        answer = one(path, "capture", sites=("second",), keep=("full",), steps=3)
        assert answer.ok and "1 site" in answer.said and "3 steps" in answer.said
        _, ended = until(path, "capture ended")
        again = one(path, "capture", sites=("second:input",), steps=1)  # it fills the place of the first
        assert again.ok and len(tap.recorder.probes) == 2
    run = tt.open(path)
    step = answer.reply["step"]
    assert ended == {"sites": ["second"], "steps": [step + 1, step + 2, step + 3]}
    assert [key.step for key, _ in run.tensors("second:output")] == ended["steps"]
    assert sorted({r.step for r in run.records(["second:output"])}) == ended["steps"]
    assert len({r.step for r in run.records(["first:output"])}) == len(run.steps)  # what was watched, throughout
    asked = [e for e in run.events().to_pylist() if e["kind"] == "control"]
    said = json.loads(asked[0]["data"])
    assert (asked[0]["name"], asked[0]["step"]) == ("capture", step)
    assert said["pid"] == os.getpid() and said["user"] and said["keep"] == ["full"] and said["done"]


def test_probes_pause_note_and_snapshot(tmp_path):
    """Probes are added and removed, recording pauses and goes on, notes and snapshots are kept."""
    path = tmp_path / "run"
    with training(path) as tap:
        assert "probe 1" in one(path, "probe add", sites=("second",), every=2).said
        assert [p["number"] for p in one(path, "status").reply["probes"]] == [0, 1]
        assert one(path, "probe remove", sites=("second",)).ok
        assert [p["number"] for p in one(path, "status").reply["probes"]] == [0]
        assert not one(path, "probe remove", probe=1).ok
        assert one(path, "note", text="halved\x1b[31m the rate").ok
        assert one(path, "snapshot").ok
        until(path, "capture ended")
        paused = one(path, "pause").reply["step"]
        while tap.recorder.current.number < paused + 5:
            time.sleep(0.002)
        assert one(path, "status").reply["state"] == "paused"
        resumed = one(path, "resume").reply["step"]
        while tap.recorder.current.number < resumed + 3:
            time.sleep(0.002)
    run = tt.open(path)
    steps = {r.step for r in run.records(["first:output"])}
    assert not steps & set(range(paused + 1, resumed + 1)) and {paused, resumed + 1} <= steps
    assert {key.site for key, _ in run.tensors()} == {"first"}
    names = [e["name"] for e in run.events().to_pylist() if e["kind"] == "control"]
    assert names[:4] == ["probe add", "probe remove", "probe remove", "note"]


def test_errors(tmp_path):
    """A pattern that matches nothing names what is near; a run that is over says so; so does a deaf one."""
    path = tmp_path / "run"
    with training(path):
        refused = one(path, "capture", sites=("secnd",))
        assert not refused.ok and "'second'" in refused.said
        assert "one of stats" in one(path, "capture", sites=("first",), keep=("fulll",)).said
        with pytest.raises(tt.TensortapError, match=r"rank must be one of \[0\]"):
            ask(path, request("status"), [3])
    with pytest.raises(tt.TensortapError, match="not live: it has finished"):
        ask(path, request("status"))
    with pytest.raises(tt.TensortapError, match="there is no run"):
        ask(tmp_path / "none", request("status"))
    with pytest.raises(tt.TensortapError, match="must be given sites"):
        ask(path, request("capture"))
    with training(tmp_path / "deaf", control=False), pytest.raises(tt.TensortapError, match="control=False"):
        ask(tmp_path / "deaf", request("status"))
    assert not can_control(path)


def test_a_socket_for_its_owner(tmp_path):
    """The socket has mode 0600 also at a path longer than a socket's may be, and is gone when the tap is closed."""
    path = tmp_path / ("long" * 30) / "run"
    where = path / "rank=0" / SOCKET
    assert len(os.fsencode(where)) > LONGEST
    with training(path):
        assert stat.S_ISSOCK(where.lstat().st_mode) and stat.S_IMODE(where.lstat().st_mode) == 0o600
        assert one(path, "status").ok
        assert tt.open(path).state == "live"
    assert not where.exists()
    assert not [link for link in Path(tempfile.gettempdir()).glob("tt-*/l") if str(tmp_path) in str(link.readlink())]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user(tmp_path):
    """Another user cannot connect, and is told whose run it is."""
    path = Path("/tmp") / f"tt-run-{os.getpid()}"
    with training(path):
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            try:
                ask(path, request("pause"))
            except tt.TensortapError as error:
                os._exit(0 if "root's socket" in str(error) else 3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert one(path, "status").reply["state"] == "recording"
    subprocess.run(["rm", "-r", path], check=True)


def raw(where, data, patience=10.0):
    """Send bytes as they are; what came back."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(patience)
        client.connect(str(where))
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        got = b""
        try:
            while part := client.recv(65536):
                got += part
        except ConnectionResetError:
            pass
        return got


def test_hostile_clients(tmp_path, monkeypatch):
    """Garbage, huge requests, slow and many clients are refused, and the run goes on and answers others."""
    monkeypatch.setattr(listener, "PATIENCE", 0.3)
    monkeypatch.chdir(tmp_path)
    path = Path("r")
    with training(path) as tap:
        where = live_sockets(path)[0]
        for data in GARBAGE:
            assert json.loads(raw(where, data))["ok"] is False, data
        assert raw(where, b"x" * 300_000)[:11] in (b"", b'{"ok": fals')
        with ExitStack() as stack:
            slow = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(listener.MOST_CLIENTS)]
            for client in slow:
                client.connect(str(where))
            assert b"asked" in raw(where, b"") or b"answered already" in raw(where, request("status").encoded())
            slow[0].settimeout(5)
            assert b"within" in slow[0].recv(1000)
            deadline = time.monotonic() + 5
            while not (answered := answers(path)) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert answered and not tap.counts


def answers(path):
    """Return whether a run answers; while it has too many clients it refuses, or closes the connection at once."""
    try:
        return one(path, "status").ok
    except ControlError:
        return False


def test_several_ranks(tmp_path, monkeypatch):
    """All ranks are asked, and capture the same steps."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    path, meeting = tmp_path / "run", threading.Barrier(2)
    with training(path, rank=0, meeting=meeting), training(path, rank=1, meeting=meeting):
        answers = ask(path, request("capture", sites=("second",), keep=("full",), steps=2))
        assert [(a.rank, a.ok) for a in answers] == [(0, True), (1, True)]
        shown = CliRunner().invoke(cli, ["ctl", str(path), "note", "both"])
        assert shown.output == "ranks 0-1: noted\n"
        deadline = time.monotonic() + 20
        while len(list(tt.open(path).tensors())) < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert CliRunner().invoke(cli, ["ctl", str(path), "pause", "--rank", "1"]).output.startswith("paused")
    steps = {rank: [key.step for key, _ in tt.open(path).tensors() if key.rank == rank] for rank in (0, 1)}
    assert steps[0] == steps[1] and len(steps[0]) == 2


def test_a_forked_child_leaves_the_socket_alone(tmp_path):
    """A forked child neither answers nor removes the socket; the parent goes on."""
    path = tmp_path / "run"
    with training(path):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert one(path, "status").reply["pid"] == os.getpid()


def test_another_process(tmp_path):
    """The command controls a training of another process; after kill -9 it says so and clears the socket away."""
    path = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", TRAIN, path], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "ready\n"
        done = subprocess.run(
            [sys.executable, "-m", "tensortap", "ctl", path, "capture", "second", "--keep", "full", "--steps", "2"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "keeps full of 1 site, for 2 steps from the next step on\n")
        _, ended = until(path, "capture ended")
        wrong = CliRunner().invoke(cli, ["ctl", str(path), "capture", "secnd"])
        assert wrong.exit_code == 1 and "'second'" in wrong.output
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert (path / "rank=0" / SOCKET).exists()
        gone = CliRunner().invoke(cli, ["ctl", str(path), "status"])
        assert gone.exit_code == 1 and "gone without closing" in gone.output
        assert not (path / "rank=0" / SOCKET).exists()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert [key.step for key, _ in tt.open(path).tensors("second:output")] == ended["steps"]
    with training(path, resume=True):
        assert one(path, "status").ok
