"""Tensors that a session's graph reduces itself, as it makes them: the very rows of the host."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx_sessions import CPU, REAL, packaged, records, session, value, watched
from sample_arrays import assert_same_row

import tensortap as tt
from tensortap.adapters.onnx.graph import OnnxGraph
from tensortap.adapters.onnx.instrumented import InstrumentedSession
from tensortap.record.counters import TensortapWarning
from tensortap.reduce import kernel as kernels

RNG = np.random.default_rng(0)
ALL = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
AS_IT_IS = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
TYPES = {
    "float32": TensorProto.FLOAT, "float64": TensorProto.DOUBLE, "float16": TensorProto.FLOAT16,
    "bool": TensorProto.BOOL, "int8": TensorProto.INT8, "int16": TensorProto.INT16, "int32": TensorProto.INT32,
    "int64": TensorProto.INT64, "uint8": TensorProto.UINT8, "uint16": TensorProto.UINT16, "uint32": TensorProto.UINT32,
    "uint64": TensorProto.UINT64,
}  # fmt: skip


def twice(shape, kind=TensorProto.FLOAT, **options):
    """Two tensors, the first of which is inside."""
    nodes = [helper.make_node("Identity", ["x"], ["inside"]), helper.make_node("Identity", ["inside"], ["y"])]
    ends = [value("x", shape, kind)], [value("y", shape, kind)]
    return session(nodes, *ends, graph_optimization_level=AS_IT_IS, **options)


@pytest.fixture
def asked(monkeypatch):
    """What was asked of every instrumented session: tensors as they are, and rows."""
    asked = []
    instrumented = OnnxGraph.instrumented_session

    def noted(self, names, rows=(), hashed=()):
        asked.append((list(names), dict(rows)))
        return instrumented(self, names, dict(rows), hashed)

    monkeypatch.setattr(OnnxGraph, "instrumented_session", noted)
    return asked


@pytest.mark.parametrize("name", TYPES)
def test_every_type(name, asked):
    """Bit for bit, buckets too."""
    array = (RNG.normal(size=(40, 3)) * 50).astype(name)
    net = twice([None, 3], TYPES[name])
    memory, tap = watched(net, "inside")
    with tap:
        net.run(None, {"x": array})
    assert_same_row(records(memory)["inside:output"], tt.summarize(array))
    assert asked == [([], {"inside": True})]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (600, 1000), (3, 5, 7, 11)])
def test_every_shape_and_number_of_threads(shape, threads):
    """From nothing to several chunks, which the session's threads share."""
    array = RNG.normal(size=shape).astype(np.float32)
    array.reshape(-1)[::7] = np.nan
    net = twice(list(shape), intra_op_num_threads=threads)
    memory, tap = watched(net, "inside:{output,input}")
    with tap:
        for _ in range(3):
            net.run(None, {"x": array})
    assert len(memory.records) == 6
    for record in memory.records:
        assert_same_row(record, tt.summarize(array))


def test_what_leaves_the_graph(asked):
    """Elements leave where a probe keeps of them, rows without buckets where nobody wants those."""
    net = twice([4])
    memory, tap = watched(net, tt.probe("inside", keep=tt.full()), tt.probe("y", keep=tt.stats()))
    with tap:
        net.run(None, {"x": np.arange(4, dtype=np.float32)})
    assert asked == [(["inside"], {"y": False})]
    assert memory.tensors[0].array.tolist() == [0, 1, 2, 3]
    assert records(memory)["y:output"]["hist_counts"] is None and records(memory)["y:output"]["max"] == 3


def test_texts_have_no_row():
    """A tensor of texts is reported as unseen, and the rest is seen."""
    nodes = [helper.make_node("Cast", ["x"], ["text"], to=TensorProto.STRING),
             helper.make_node("Cast", ["text"], ["y"], to=TensorProto.FLOAT)]  # fmt: skip
    net = session(nodes, [value("x", [2])], [value("y", [2])], graph_optimization_level=AS_IT_IS)
    memory, tap = watched(net, "*")
    net.run(None, {"x": np.ones(2, np.float32)})
    assert tap._adapter.unseen().keys() == {"text:output"}
    tap.close()
    assert list(records(memory)) == ["y:output"]


def test_sequences_leave_as_they_are(asked):
    """A list of tensors cannot be reduced in the graph, so that all leave it; nothing is lost."""
    nodes = [helper.make_node("SequenceConstruct", ["x", "x"], ["list"]),
             helper.make_node("ConcatFromSequence", ["list"], ["y"], axis=0)]  # fmt: skip
    net = session(nodes, [value("x", [2])], [value("y", [4])], graph_optimization_level=AS_IT_IS)
    memory, tap = watched(net, "*")
    with tap:
        net.run(None, {"x": np.ones(2, np.float32)})
    assert set(records(memory)) == {"list:output[0]", "list:output[1]", "y:output"}
    assert [rows for _, rows in asked] == [{"list": True, "y": True}, {}]


def test_channels_in_blocks():
    """Of convolutions in blocks of channels, whole or filled up, the counts are exact and sums good to rounding."""
    nodes, constants, given = [], [], "x"
    for i, (before, after) in enumerate([(16, 32), (32, 24), (24, 32)]):
        weight = RNG.normal(0, 0.1, (after, before, 3, 3)).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"w{i}"))
        nodes.append(helper.make_node("Conv", [given, f"w{i}"], [f"conv{i}"], pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"conv{i}"], [f"relu{i}"]))
        given = f"relu{i}"
    shape = [2, 16, 12, 12]
    net = session(nodes, [value("x", shape)], [value(given, [2, 32, 12, 12])], constants, graph_optimization_level=ALL)
    feed = {"x": RNG.normal(size=shape).astype(np.float32)}
    memory, tap = watched(net, "relu?")
    with tap:
        net.run(None, feed)
    elements = tt.capture(net, feed, "relu?")
    seen = records(memory)
    assert len(seen) == len(elements) == 3
    for name, array in elements.items():
        record, expected = seen[f"{name}:output"], tt.summarize(array)
        for exact in ("numel", "zeros", "min", "max", "shape", "hist_offset"):
            assert record[exact] == expected[exact], (name, exact)
        assert np.array_equal(record["hist_counts"], expected["hist_counts"])
        for rounded in ("mean", "std", "l1", "l2"):
            assert record[rounded] == pytest.approx(expected[rounded], rel=1e-6)
    memory, tap = watched(net, tt.probe("relu?", keep=tt.hash()))
    with tap:
        net.run(None, feed)
    hashes = {name: tt.summarize(array, hash=True).hash for name, array in elements.items()}
    assert {name.partition(":")[0]: record["hash"] for name, record in records(memory).items()} == hashes


@pytest.mark.parametrize("keep", [[tt.hash()], [tt.hash(), tt.histogram()]])
def test_hashes(keep):
    """The content hash is taken inside the graph, with a histogram or without."""
    array = RNG.normal(size=(700, 300)).astype(np.float32)
    net = twice([None, 300])
    memory, tap = watched(net, tt.probe("inside", keep=keep))
    with tap:
        net.run(None, {"x": array})
    record = records(memory)["inside:output"]
    assert record["hash"] == tt.summarize(array, hash=True).hash and (record["hist_counts"] is None) == (len(keep) == 1)


@pytest.mark.filterwarnings("ignore:.*inside If, Loop or Scan nodes:tensortap.TensortapWarning")
@pytest.mark.parametrize("name", ["silero", "magika", "ocr-cls"])
def test_a_model_from_the_wild(name):
    """Every tensor's row is that of its elements, up to the order in which they are added."""
    package, file, _, feed = REAL[name]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # threads that wait for work do it in a busy loop
    net = onnxruntime.InferenceSession(packaged(package, file), options, providers=CPU)
    memory, tap = watched(net, "*")
    with tap:
        net.run(None, feed)
    elements, seen = tt.capture(net, feed, "*"), records(memory)
    both = [key for key in elements if f"{key}:output" in seen]
    assert len(both) == len(elements) > 20
    for key in both:
        record, expected = seen[f"{key}:output"], tt.summarize(elements[key])
        assert [record[k] for k in ("numel", "zeros", "min", "max")] == pytest.approx(
            [expected[k] for k in ("numel", "zeros", "min", "max")], rel=0, nan_ok=True
        )
        assert record["std"] == pytest.approx(expected["std"], rel=1e-6, abs=1e-12, nan_ok=True)


def test_many_runs_at_a_time():
    """Sessions run by several threads reduce at the same time, with histograms of their own."""
    net = twice([None, 700], intra_op_num_threads=2)
    arrays = [np.random.default_rng(i).normal(i, 1, (500, 700)).astype(np.float32) for i in range(4)]

    def run(array):
        for _ in range(6):
            net.run(None, {"x": array})

    memory, tap = watched(net, "inside")
    with tap:
        threads = [
            threading.Thread(target=lambda a: [net.run(None, {"x": a}) for _ in range(6)], args=(a,)) for a in arrays
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    expected = {summary["mean"]: summary for summary in map(tt.summarize, arrays)}
    assert len(memory.records) == 24
    for record in memory.records:
        assert_same_row(record, expected[record["mean"]])


def test_without_the_extension(monkeypatch, asked):
    """Where there is no C kernel tensors leave as they are."""
    monkeypatch.setattr(kernels, "library", None)
    net = twice([4])
    memory, tap = watched(net, "inside")
    with tap:
        net.run(None, {"x": np.arange(4, dtype=np.float32)})
    assert asked == [(["inside"], {})] and memory.records[0]["mean"] == 1.5


def test_the_users_options_are_theirs():
    """The options object that the user made a session with can make another that knows nothing of us."""
    options = onnxruntime.SessionOptions()
    nodes = [helper.make_node("Neg", ["x"], ["y"])]
    graph = helper.make_graph(nodes, "g", [value("x", [2])], [value("y", [2])])
    content = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    net = onnxruntime.InferenceSession(content, options, providers=CPU)
    with watched(net)[1]:
        net.run(None, {"x": np.ones(2, np.float32)})
    node = helper.make_node("Row", ["x"], ["y"], domain="tensortap")
    graph = helper.make_graph([node], "g", [value("x", [2])], [value("y", [None], TensorProto.UINT32)])
    ours = helper.make_model(graph, opset_imports=[helper.make_opsetid("tensortap", 1)], ir_version=9)
    with pytest.raises(Exception, match="tensortap"):
        onnxruntime.InferenceSession(ours.SerializeToString(), options, providers=CPU)


def test_a_row_that_could_not_be_made_takes_no_other_with_it(monkeypatch):
    """A tensor for which there was no memory is counted, and all others are recorded."""
    observe = InstrumentedSession.observe

    def short_of_memory(self, *given):
        found = observe(self, *given)
        found.rows["inside"][:2].view(np.int64)[0] = -1  # as the kernel leaves it
        return found

    monkeypatch.setattr(InstrumentedSession, "observe", short_of_memory)
    net, memory = twice([4]), tt.Memory()
    with pytest.warns(TensortapWarning, match="no memory"), tt.watch(net, "inside", "y", to=memory) as tap:
        net.run(None, {"x": np.arange(4, dtype=np.float32)})
    assert [*records(memory)] == ["y:output"] and tap.counts["skipped_tensors"] == 1


def test_a_library_from_before_the_interface_is_refused():
    """An ONNX Runtime that lacks the functions we call is told so, and not called."""
    said = []
    status = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(lambda code, text: said.append(text) or 7)
    first = (ctypes.c_void_p * 1)(ctypes.cast(status, ctypes.c_void_p))
    table = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)(lambda n: ctypes.addressof(first) if n == 1 else None)
    base = (ctypes.c_void_p * 2)(ctypes.cast(table, ctypes.c_void_p), None)
    register = ctypes.CDLL(kernels.library).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, base) == 7 and b"1.17" in said[0]
