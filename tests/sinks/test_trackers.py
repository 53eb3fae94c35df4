"""Weights & Biases, MLflow and trackio: what they hold afterwards, read back from their own files."""

import json
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

import tensortap as tt
from tensortap.errors import MissingExtraError

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
BAD = X.copy()
BAD[0, :3] = np.nan, np.inf, -np.inf


def train(to, steps=3, log=lambda step: None):
    """Three steps of two sites, one of them with NaN; `log` is what the user does besides."""
    with tt.watch(to=to) as tap:
        for step in range(steps):
            tt.tap(X * (step + 1), "blocks.3.mlp")
            tt.tap(BAD, "head")
            tap.step(loss=1.0 / (step + 1))
            tap.flush()
            log(step)
    assert tap.counts == {}


def wandb_records(path):
    """The records in an offline run's file, which is a LevelDB log after seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole one, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def wandb_rows(wandb, folder):
    """What an offline run logged, row by row; the parts of a histogram are `….values` and so on."""
    wandb.teardown()  # its server writes the end of the file only then
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    items = [r.history.item for r in wandb_records(file) if r.HasField("history")]
    return [{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row} for row in items]


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """Weights & Biases, offline and quiet, in a folder of its own."""
    found = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.thorough  # the run that is given has the same rows
def test_wandb_in_a_run_of_its_own(wandb, tmp_path):
    """Without an active run one is made and ended; a step is a row with our step number, metrics and histograms."""
    sink = tt.WandB(dir=str(tmp_path))
    train(sink)
    rows = wandb_rows(wandb, tmp_path)
    assert [row["tensortap/step"] for row in rows] == [0, 1, 2]
    assert [row["tensortap/blocks.3.mlp/output/std"] for row in rows] == pytest.approx([X.std() * n for n in (1, 2, 3)])
    assert [row["loss"] for row in rows] == pytest.approx([1, 1 / 2, 1 / 3])
    assert [row["tensortap/head/output/nonfinite"] for row in rows] == [3, 3, 3]
    assert sum(rows[0]["tensortap/head/output/histogram.values"]) == pytest.approx(X.size - 3)
    assert np.isfinite(rows[0]["tensortap/head/output/histogram.bins"]).all()
    assert wandb.run is None


def test_wandb_in_the_users_run(wandb, tmp_path):
    """In the active run our rows go out with the user's, whose metrics are theirs; the run is left open."""
    with wandb.init(project="mine", dir=str(tmp_path)) as run:
        sink = tt.WandB()
        train(sink, log=lambda step: run.log({"mine": step}))
        assert (sink.run, sink.replaced) == (run, 0)
        run.log({"mine": 99})
    rows = wandb_rows(wandb, tmp_path)
    assert [row["mine"] for row in rows] == [0, 1, 2, 99]
    assert [row.get("tensortap/step") for row in rows] == [0, 1, 2, None]
    assert not any("loss" in row for row in rows)


def test_wandb_leaves_the_users_steps_alone(wandb, tmp_path):
    """A user who numbers the steps loses none; rows of ours that no later `log()` carried are replaced and counted."""
    with wandb.init(project="mine", dir=str(tmp_path)) as run:
        sink = tt.WandB()
        train(sink, log=lambda step: run.log({"mine": step}, step=10 * step))
        assert sink.replaced == 1
    rows = wandb_rows(wandb, tmp_path)
    assert {row["_step"]: row["mine"] for row in rows} == {0: 0, 10: 1, 20: 2}
    assert [row["tensortap/step"] for row in rows if "tensortap/step" in row] == [1, 2]


def test_wandb_ended_too_early(wandb, tmp_path):
    """A run that the user ended before the tap costs its rows, which are counted; the training goes on."""
    run = wandb.init(project="mine", dir=str(tmp_path))
    with pytest.warns(tt.TensortapWarning, match="Weights & Biases"), tt.watch(to=tt.WandB()) as tap:
        run.finish()
        for _ in range(3):
            tt.tap(X, "fc")
            tap.step()
    assert tap.counts == {"sink_errors": 3}


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow with files in a folder of its own."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found = pytest.importorskip("mlflow")
    found.set_tracking_uri(f"file://{tmp_path}/mlruns")
    yield found
    found.set_tracking_uri("")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.thorough  # the run that is given has the same rows
def test_mlflow_in_a_run_of_its_own(mlflow, tmp_path):
    """Without an active run one is made in the experiment `tensortap`, and ended with the tap."""
    sink = tt.MLflow()
    train(sink)
    client = mlflow.MlflowClient()
    run = client.get_run(sink.run_id)
    history = client.get_metric_history(sink.run_id, "tensortap/blocks.3.mlp/output/std")
    assert [(m.step, m.value) for m in history] == [(n, pytest.approx(X.std() * (n + 1))) for n in range(3)]
    assert run.data.metrics["loss"] == pytest.approx(1 / 3)
    assert run.data.metrics["tensortap/head/output/nonfinite"] == 3
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "tensortap"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow_in_the_users_run(mlflow, make_step):
    """The active run is used and left open; names are made fit, and a thousand metrics is not too many."""
    mlflow.set_experiment("mine")
    with mlflow.start_run() as run:
        sink = tt.MLflow()
        sink.write(make_step({f"b{n}(x)": X[0] for n in range(250)}, metrics={"loss": 1.0}))
        sink.close()
        assert mlflow.active_run() is not None
    found = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert len(found) == 250 * 5
    assert "tensortap/b249_x_/output/std" in found


TRACKIO = """
import json, numpy, tensortap as tt
from trackio.sqlite_storage import SQLiteStorage
x = numpy.array([1, 2, numpy.nan], numpy.float32)
with tt.watch(to=tt.Trackio(project="layers", name="one")) as tap:
    for step in range(3):
        tt.tap(x * (step + 1), "fc")
        tap.step(loss=step)
assert not tap.counts, tap.counts
print(json.dumps(SQLiteStorage.get_logs("layers", "one"), default=str))
"""


def test_trackio(tmp_path):
    """A run of its own holds every step with our numbers, metrics and histograms; NaN spoils none of it."""
    pytest.importorskip("trackio")
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path)}  # trackio reads it when it is imported
    words = [sys.executable, "-c", TRACKIO]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    assert [(row["step"], row["tensortap/fc/output/absmax"], row["loss"]) for row in rows] == [
        (0, 2, 0),
        (1, 4, 1),
        (2, 6, 2),
    ]
    assert [row["tensortap/fc/output/nonfinite"] for row in rows] == [1, 1, 1]
    assert sum(rows[0]["tensortap/fc/output/histogram"]["values"]) == 2


@pytest.mark.parametrize(("name", "make"), [("wandb", tt.WandB), ("mlflow", tt.MLflow), ("trackio", tt.Trackio)])
def test_missing(name, make, monkeypatch):
    """Where the package is missing the error names the line that installs it."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"{make.__name__}\(…\) needs .*: pip install '(tensortap\[)?{name}"):
        make()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_mlflow_as_installed(tmp_path, monkeypatch):
    """Nobody has chosen a store, and MLflow's default cannot be opened: files are written, which is said."""
    found = pytest.importorskip("mlflow")
    pytest.importorskip("mlflow.store.tracking.file_store")
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    found.set_tracking_uri("")
    try:
        found.MlflowClient()
    except Exception:
        with pytest.warns(tt.TensortapWarning, match="folder mlruns"):
            sink = tt.MLflow()
    else:
        pytest.skip("the default store can be opened here")
    train(sink)
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    client = found.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    assert client.get_run(sink.run_id).data.metrics["loss"] == pytest.approx(1 / 3)


def test_mlflow_with_a_store_that_cannot_be_opened():
    """A store that the user chose is not exchanged for another: what to write is said."""
    pytest.importorskip("mlflow")
    with pytest.raises(tt.TensortapError, match=r"MLflow cannot open the store 'nowhere://x'.*MLflow\(uri="):
        tt.MLflow(uri="nowhere://x")
