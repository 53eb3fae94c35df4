"""What TensorBoard's own reader finds in what we wrote for it."""

import subprocess
import sys
import time
from io import FileIO
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensortap as tt
from tensortap.errors import MissingExtraError, ProbeError, RunError
from tensortap.reduce.summary import summarize
from tensortap.sinks.crc32c import masked
from tensortap.sinks.export import export
from tensortap.sinks.tensorboard import TensorBoard, histogram_fields
from tensortap.types import Place

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TensorBoard's own

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
BAD = X.copy()
BAD[0, :3] = np.nan, np.inf, -np.inf


def read(folder):
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))  # its reader would import TensorFlow
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0}).Reload()


def scalars(events, tag):
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]


def test_scalars_histograms_and_metrics_live(tmp_path):
    """A watched training is there step by step, under the module's name, with our step numbers and times."""
    with tt.watch(to=TensorBoard(tmp_path / "tb")) as tap:
        for step in range(3):
            tt.tap(X * (step + 1), "blocks.3.mlp")
            tap.step(loss=1.0 / (step + 1))
    events = read(tmp_path / "tb")
    assert [(n, v) for n, v in scalars(events, "blocks.3.mlp/output/std")] == [(i, X.std() * (i + 1)) for i in range(3)]
    assert [(e.step, e.value) for e in events.Scalars("metrics/loss")] == [
        (0, 1.0),
        (1, 0.5),
        (2, pytest.approx(1 / 3)),
    ]
    assert all(abs(e.wall_time - time.time()) < 60 for tag in events.Tags()["scalars"] for e in events.Scalars(tag))
    stats = {"mean", "std", "absmax", "zero_share", "nonfinite"}
    assert set(events.Tags()["scalars"]) == {f"blocks.3.mlp/output/{stat}" for stat in stats} | {"metrics/loss"}
    last = events.Histograms("blocks.3.mlp/output")[-1]
    assert (last.step, last.histogram_value.num) == (2, X.size)
    assert last.histogram_value.min == pytest.approx(3 * X.min())


def test_nan_does_not_break_the_histogram(make_step, tmp_path):
    """NaN and infinities are left out of the histogram and counted beside it; where nothing is finite there is none."""
    sink = TensorBoard(tmp_path)
    sink.write(make_step({"some": BAD, "all": np.full(7, np.nan, np.float32)}, metrics={"loss": float("nan")}))
    sink.close()
    events = read(tmp_path)
    histogram = events.Histograms("some/output")[0].histogram_value
    assert sum(histogram.bucket) == X.size - 3
    assert np.isfinite([*histogram.bucket_limit, histogram.min, histogram.max, histogram.sum]).all()
    assert events.Tags()["histograms"] == ["some/output"]
    assert [events.Scalars(f"{site}/output/nonfinite")[0].value for site in ("some", "all")] == [3, 7]
    assert "all/output/mean" not in events.Tags()["scalars"]
    assert np.isnan(events.Scalars("metrics/loss")[0].value)


def test_the_web_page_reads_the_histogram_as_we_meant_it(make_step, tmp_path):
    """After TensorBoard's own conversion each bar holds what NumPy counts between its ends."""
    from tensorboard import data_compat
    from tensorboard.util import tensor_util

    values = np.concatenate([X.ravel(), np.zeros(100, np.float32)])
    proto = TensorBoard(tmp_path)._protos
    value = proto.Value(tag="x", histo=proto.HistogramProto(**histogram_fields(summarize(values))._asdict()))
    low, high, count = tensor_util.make_ndarray(data_compat.migrate_value(value).tensor).T
    assert (low < high).all() and (low[1:] == high[:-1]).all()
    assert low[0] == values.min() and high[-1] == values.max()
    # A value on an edge belongs to the bar further out.
    inside = [
        np.sum((values >= a) & (values < b) if a >= 0 else (values > a) & (values <= b))
        for a, b in zip(low, high, strict=True)
    ]
    near_zero = (low < 0) & (high > 0)
    assert count[near_zero] == 100
    np.testing.assert_array_equal(count[~near_zero][1:-1], np.array(inside)[~near_zero][1:-1])
    assert count.sum() == values.size


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40))
def test_every_histogram_is_a_ladder(values):
    """Limits rise, no bar is empty at the ends, and all finite elements are counted, whatever the values."""
    found = histogram_fields(summarize(np.array(values, np.float32)))
    assert found.bucket_limit == sorted(set(found.bucket_limit))
    assert found.min < found.bucket_limit[0] and found.max == found.bucket_limit[-1]
    assert found.bucket[0] and found.bucket[-1] and sum(found.bucket) == len(values)


@given(st.binary(max_size=300))
def test_checksum(data):
    """Our checksum is TensorBoard's."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    assert masked(data) == masked_crc32c(data)


def test_evaluation_and_ranks_are_runs_of_their_own(make_step, tmp_path):
    """What is not the first rank's training has a folder of its own, which TensorBoard shows as a run."""
    from dataclasses import replace

    sink = TensorBoard(tmp_path)
    step = make_step({"fc": X}, rank=1)
    sink.write(step)
    sink.write(replace(step, number=1, phase="eval", rank=0))
    sink.close()
    assert {p.parent.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("events*")} == {"rank-1", "eval"}
    assert read(tmp_path / "rank-1").Tags()["scalars"] and read(tmp_path / "eval").Tags()["scalars"]


def test_calls_slots_and_the_root_have_names(make_step, tmp_path):
    """The second call of a module, a slot and the root module are told apart by their tags."""
    sink = TensorBoard(tmp_path, stats=["std"], histograms=False)
    sink.write(make_step({"fc": [X, X], Place("enc", "output", ".hidden[1]"): X, Place("", "output"): X}))
    sink.close()
    tags = ["fc/output/std", "fc/output/call-1/std", "enc/output.hidden[1]/std", "(root)/output/std"]
    assert read(tmp_path).Tags()["scalars"] == tags


def test_export(make_run, tmp_path):
    """A stored run is written as it would have been live, and again only when told to."""
    run = tt.open(make_run([({"fc": X, "head": BAD}, {"loss": n / 2}) for n in range(4)]))
    done = export(run, "tensorboard", tmp_path / "tb", steps=slice(1, None))
    assert done.records == 6
    events = read(tmp_path / "tb")
    assert [(e.step, e.value) for e in events.Scalars("metrics/loss")] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert [e.step for e in events.Histograms("head/output")] == [1, 2, 3]
    assert events.Scalars("fc/output/std")[0].wall_time == pytest.approx(1_700_000_000.0, abs=1)
    with pytest.raises(RunError, match="overwrite"):
        export(run, "tensorboard", tmp_path / "tb")
    export(run, "tensorboard", tmp_path / "tb", overwrite=True)
    (tmp_path / "tb" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="no export wrote"):
        export(run, "tensorboard", tmp_path / "tb", overwrite=True)


def test_a_torn_file_is_not_written_on(make_step, tmp_path):
    """After an event that could not be written the next one begins a new file, so that readers see it."""
    sink = TensorBoard(tmp_path)
    sink.write(make_step({"fc": X}))
    sink._files[""].close()
    sink._files[""]._file = FileIO("/dev/full", "w")
    with pytest.raises(OSError, match="space"):
        sink.write(make_step({"fc": X}, number=1))
    sink.write(make_step({"fc": X}, number=2))
    sink.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert [event.step for event in read(tmp_path).Scalars("fc/output/std")] == [0, 2]


def test_bad_statistic(tmp_path):
    """A statistic that there is not is refused with the nearest that there is."""
    with pytest.raises(ProbeError, match="Did you mean 'zero_share'"):
        TensorBoard(tmp_path, stats=["zeros_share"])


def test_without_tensorboard(tmp_path, monkeypatch):
    """Where TensorBoard is missing the error says how to get it, and nothing is made."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tensortap\[tensorboard\]'"):
        TensorBoard(tmp_path / "tb")
    assert not (tmp_path / "tb").exists()


def test_no_tensorflow():
    """Writing events imports neither TensorFlow nor PyTorch, though both are installed."""
    code = (
        "import sys, tempfile, numpy, tensortap as tt\n"
        "with tt.watch(to=tt.TensorBoard(tempfile.mkdtemp())) as tap:\n"
        "    tt.tap(numpy.ones(3), 'x'); tap.step(loss=1)\n"
        "print([name for name in ('tensorflow', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
