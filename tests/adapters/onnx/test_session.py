"""ONNX Runtime sessions: after optimisation, bit for bit, with everything a session may be given."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
import reference
from onnx import TensorProto, helper, numpy_helper
from onnx_sessions import CPU, REAL, packaged, records, session, value, watched
from subject_onnx import Subject, model

import tensortap as tt

X = reference.batch()


def test_fused_tensors_are_named_as_such():
    """Where ONNX Runtime fuses an activation into a layer, the tensor between them is listed with the reason."""
    net = Subject("ORT_ENABLE_ALL").model
    assert "fused" in tt.sites(net).untappable["fc1"]
    assert "act" in {site.path for site in tt.sites(net)}
    with pytest.raises(tt.TensortapError, match="'fc1' cannot be tapped: it was fused"):
        tt.watch(net, "fc1", to=tt.Memory())
    with pytest.raises(tt.TensortapError, match="fused"):
        tt.capture(net, X, "fc1")


def test_after_optimisation_outputs_are_the_same_bits():
    """With every tensor tapped the fused session gives what it gave."""
    net = Subject("ORT_ENABLE_ALL").model
    bare = net.run(None, {"x": X})[0]
    memory, tap = watched(net, "**:{input,output}")
    with tap:
        outputs = [net.run(None, {"x": X})[0] for _ in range(3)]
    assert all(output.tobytes() == bare.tobytes() for output in outputs)
    assert len({record.step for record in memory.records}) == 3


def test_only_the_outputs_asked_for_are_returned():
    """All of them for None or an empty list, else those that are named, in that order."""
    gives = [value("a", [2]), value("b", [2])]
    nodes = [helper.make_node(*node) for node in (("Neg", ["x"], ["a"]), ("Abs", ["a"], ["m"]), ("Exp", ["m"], ["b"]))]
    net = session(nodes, [value("x", [2])], gives)
    feed = {"x": np.array([1, -2], np.float32)}
    bare = [net.run(names, feed) for names in (None, [], ["b"], ["b", "a"])]
    memory, tap = watched(net, "m", ":output")
    with tap:
        seen = [net.run(names, feed) for names in (None, [], ["b"], ["b", "a"])]
    assert [[x.tolist() for x in run] for run in seen] == [[x.tolist() for x in run] for run in bare]
    assert [len([r for r in memory.records if r.step == step]) for step in range(4)] == [3, 3, 2, 3]


def test_inputs_and_outputs_of_the_session_go_by_name():
    """Several have slots; those of a node as well."""
    net = session([helper.make_node("Add", ["p", "q"], ["s"])], [value("p", [2]), value("q", [2])], [value("s", [2])])
    memory, tap = watched(net, "**:{input,output}")
    with tap:
        net.run(None, {"p": np.ones(2, np.float32), "q": np.zeros(2, np.float32)})
    assert list(records(memory)) == [":input.p", ":input.q", "s:input.p", "s:input.q", "s:output", ":output"]


def test_run_options_are_honoured():
    """They go to whichever session runs; a run that is told to stop, stops."""
    net = Subject().model
    options = onnxruntime.RunOptions()
    memory, tap = watched(net, "fc1")
    with tap:
        net.run(None, {"x": X}, options)
        options.terminate = True
        with pytest.raises(Exception, match="terminate"):
            net.run(None, {"x": X}, options)
    assert len(memory.records) == 1


def test_other_ways_to_run_are_counted_and_go_on():
    """IO binding and OrtValues are not seen; the user is told once, and gets what they would have got."""
    net = Subject().model
    bare = net.run(None, {"x": X})[0]
    tap = tt.watch(net, "fc1", to=tt.Memory())
    binding = net.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_output("head")
    with tap, pytest.warns(tt.TensortapWarning, match="not seen") as said:
        for _ in range(2):
            net.run_with_iobinding(binding)
        value = onnxruntime.OrtValue.ortvalue_from_numpy(X)
        other = net.run_with_ort_values(None, {"x": value})[0].numpy()
    assert binding.copy_outputs_to_cpu()[0].tobytes() == other.tobytes() == bare.tobytes()
    assert tap.counts["unseen_runs"] == 3 and len(said) == 2


def test_external_data(tmp_path):
    """A model whose weights lie in a file beside it is watched like any other."""
    path = tmp_path / "net.onnx"
    onnx.save(model(), path, save_as_external_data=True, location="weights", size_threshold=0)
    net = onnxruntime.InferenceSession(path, providers=CPU)
    bare = net.run(None, {"x": X})[0]
    found = tt.capture(net, X, "head")
    assert found["head"].tobytes() == found.output[0].tobytes() == bare.tobytes()
    memory, tap = watched(net, "**:param")
    with tap:
        net.run(None, {"x": X})
        tap.step()
    expected = tt.summarize(reference.weights()["head"][0])
    assert records(memory)["head.weight:param"]["l2"] == expected.l2


def test_external_data_beside_bytes(tmp_path):
    """A model given as bytes, with the folder of its weights among the options, is watched too."""
    onnx.save(model(), tmp_path / "net.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    entry = ("session.model_external_initializers_file_folder_path", str(tmp_path))
    options.add_session_config_entry(*entry)
    net = onnxruntime.InferenceSession((tmp_path / "net.onnx").read_bytes(), options, providers=CPU)
    bare = net.run(None, {"x": X})[0]
    memory, tap = watched(net, "head:output", "head.weight:param")
    with tap:
        assert net.run(None, {"x": X})[0].tobytes() == bare.tobytes()
    assert records(memory)["head:output"]["l2"] == tt.summarize(bare).l2
    assert records(memory)["head.weight:param"]["l2"] == tt.summarize(reference.weights()["head"][0]).l2
    assert options.get_session_config_entry(entry[0]) == entry[1]


def test_a_file_of_the_users_own_stays(tmp_path):
    """Where the session has written its optimised model, watching writes nothing."""
    path = tmp_path / "optimised.onnx"
    nodes = [helper.make_node("Neg", ["x"], ["n"]), helper.make_node("Exp", ["n"], ["y"])]
    quiet = {"optimized_model_filepath": str(path), "log_severity_level": 3}
    net = session(nodes, [value("x", [2])], [value("y", [2])], **quiet)
    before = path.read_bytes()
    _, tap = watched(net)
    with tap:
        net.run(None, {"x": np.ones(2, np.float32)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_model_that_is_gone(tmp_path):
    """A session whose file was deleted cannot be built again, which is said, and not blamed on its provider."""
    path = tmp_path / "net.onnx"
    onnx.save(model(), path)
    net = onnxruntime.InferenceSession(path, providers=CPU)
    path.unlink()
    with pytest.raises(tt.TensortapError, match="which is not there any more") as refused:
        tt.watch(net, to=tt.Memory())
    assert "CUDA" not in str(refused.value)


def test_what_the_session_is_given_is_no_site():
    """Its name is refused with the pattern that shows it."""
    with pytest.raises(tt.TensortapError, match="'x' cannot be tapped: it is given to the session: ':input' shows it"):
        tt.watch(Subject().model, "x", to=tt.Memory())


def test_a_random_graph_gives_the_numbers_of_the_session():
    """Where the copy draws other numbers both run, the user gets the session's, and is told."""
    nodes = [helper.make_node("RandomNormal", [], ["r"], shape=[4]), helper.make_node("Neg", ["r"], ["y"])]
    feed = {"x": np.zeros(1, np.float32)}
    made = []
    for _ in range(2):
        onnxruntime.set_seed(3)
        made.append(session(nodes, [value("x", [1])], [value("y", [4])]))
    bare = [made[0].run(None, feed)[0].tolist() for _ in range(3)]
    memory = tt.Memory()
    with tt.watch(made[1], "r", to=memory), pytest.warns(tt.TensortapWarning, match="need not give equal bits"):
        seen = [made[1].run(None, feed)[0].tolist() for _ in range(3)]
    assert seen == bare
    assert len(memory.records) == 3


def bfloat16():
    """A session with a tensor of a type that NumPy lacks."""
    return session(
        [helper.make_node("Cast", ["x"], ["half"], to=TensorProto.BFLOAT16),
         helper.make_node("Cast", ["half"], ["y"], to=TensorProto.FLOAT)],
        [value("x", [2])], [value("y", [2])],
        graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL,
    )  # fmt: skip


def test_what_python_cannot_read_is_said():
    """Of a bfloat16 tensor there are statistics; its elements cannot be kept, which is reported."""
    net, memory = bfloat16(), tt.Memory()
    with tt.watch(net, tt.probe("**", keep=tt.full()), to=memory) as tap:
        net.run(None, {"x": np.ones(2, np.float32)})
        assert "bfloat16" in tap._adapter.unseen()["half:output"]
    assert sorted(records(memory)) == [":output", "y:output"]


def test_a_type_that_numpy_lacks_has_statistics():
    """The graph reduces it itself."""
    net = bfloat16()
    memory, tap = watched(net)
    net.run(None, {"x": np.array([1, 3.01], np.float32)})
    tap.close()
    half = records(memory)["half:output"]
    assert (half["dtype"], half["mean"], half["shape"]) == ("bfloat16", 2.0078125, (2,))  # 3.01 is 3.015625 there


def test_branches_and_loops_are_listed_as_out_of_reach():
    """What lies inside an If is named, with the node that holds it."""

    def branch(op):
        return helper.make_graph([helper.make_node(op, ["x"], [f"in_{op}"])], op, [], [value(f"in_{op}", [2])])

    net = session(
        [helper.make_node("If", ["c"], ["y"], "choose", then_branch=branch("Neg"), else_branch=branch("Abs"))],
        [value("x", [2]), value("c", [], TensorProto.BOOL)], [value("y", [2])],
    )  # fmt: skip
    assert "inside the If node 'choose'" in tt.sites(net).untappable["in_Neg"]
    found = tt.capture(net, {"x": np.ones(2, np.float32), "c": np.array(True)}, "y")
    assert found["y"].tolist() == [-1, -1]


def test_a_misspelt_tensor_with_a_slash():
    """It may be a value to be named later, so it is no error, but the nearest tensors are told."""
    name = "/fc/Neg_output_0"
    nodes = [helper.make_node("Neg", ["x"], [name]), helper.make_node("Abs", [name], ["y"])]
    net = session(nodes, [value("x", [2])], [value("y", [2])])
    with (
        pytest.warns(tt.TensortapWarning, match="Did you mean '/fc/Neg_output_0'"),
        tt.watch(net, "/fc/Neg_output_1", to=tt.Memory()),
    ):
        pass


def test_threads_have_steps_of_their_own():
    """Two threads that run one session, as a server does, do not mix their steps."""
    net = Subject().model
    memory, tap = watched(net, "fc1", "head")
    both = threading.Barrier(2)

    def serve():
        for _ in range(10):
            both.wait()
            net.run(None, {"x": X})

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tap.close()
    steps = [record.step for record in memory.records]
    assert len(steps) == 40 and {steps.count(step) for step in steps} == {2}


def test_somebody_elses_wrapper_stays():
    """A `run` that the user has put on the session meanwhile is theirs, and works."""
    net = Subject().model
    _, tap = watched(net, "fc1")
    inner = net.run
    net.run = lambda *args: inner(*args)
    tap.close()
    assert net.run(None, {"x": X})[0].shape == (reference.BATCH, reference.OUT)
    assert not isinstance(vars(net)["run"], type(inner))


def test_without_onnx(monkeypatch):
    """Where the package is missing the error says what to install."""
    monkeypatch.setitem(sys.modules, "onnx", None)
    for name in [name for name in sys.modules if name.startswith("tensortap.adapters.onnx.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(tt.TensortapError, match=r"tensortap\[onnx\]"):
        tt.sites(Subject().model)


@pytest.mark.filterwarnings("ignore:.*inside If, Loop or Scan nodes:tensortap.TensortapWarning")
@pytest.mark.parametrize("name", REAL)
def test_models_from_the_wild(name):
    """Speech, file types and text in pictures: every tensor of the optimised graph, and the same bits."""
    package, file, least, feed = REAL[name]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    net = onnxruntime.InferenceSession(packaged(package, file), options, providers=CPU)
    bare = net.run(None, feed)
    memory, tap = watched(net)
    with tap:
        outputs = [net.run(None, feed) for _ in range(2)]
    for run in outputs:
        assert [x.tobytes() for x in run] == [x.tobytes() for x in bare]
    assert len({record.place for record in memory.records}) >= least
    assert set(tap.counts) - {"unseen"} == ({"unseen_nodes"} if name == "silero" else set())
    produced = records(memory)
    for output, array in zip(net.get_outputs(), bare, strict=True):
        assert produced[f"{output.name}:output"]["l2"] == tt.summarize(array).l2


def test_constants_folded_at_load():
    """A tensor that only depends on constants is computed when the session loads, and is a parameter from then on."""
    constant = numpy_helper.from_array(np.ones(2, np.float32), "c")
    nodes = [helper.make_node("Neg", ["c"], ["n"]), helper.make_node("Add", ["x", "n"], ["y"])]
    found = tt.sites(session(nodes, [value("x", [2])], [value("y", [2])], [constant]))
    assert [(site.path, site.ports) for site in found][1:] == [("y", ("output", "input")), ("n", ("param",))]


@pytest.mark.parametrize("name", ["ocr-cls", "ocr-det"])
def test_convolutions_in_blocks_of_channels(name):
    """Where convolutions run in blocks, tensors between them are those of a session that does not, name by name."""
    package, file, _, feed = REAL[name]
    found = []
    for level in ("ORT_ENABLE_ALL", "ORT_ENABLE_EXTENDED"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        options.intra_op_num_threads = 1  # threads that wait for work do it in a busy loop
        net = onnxruntime.InferenceSession(packaged(package, file), options, providers=CPU)
        marked = {site.path for site in tt.sites(net) if "Blocked" in site.types}
        found.append({key: array for key, array in tt.capture(net, feed, "**").items() if key not in marked})
    assert marked == set()  # of the second
    both = found[0].keys() & found[1].keys()
    assert len(both) >= 0.9 * len(found[1])
    for key in both:
        assert np.allclose(found[0][key], found[1][key], rtol=1e-2, atol=1e-6 + 1e-3 * np.abs(found[1][key]).max()), key
