"""Nodes inside If and Loop nodes are counted, and what to do about them is said."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import tensortap as tt


def branch(kind):
    nodes = [
        helper.make_node(kind, ["middle"], [f"in_{kind}"]),
        helper.make_node("Tanh", [f"in_{kind}"], [f"o_{kind}"]),
    ]
    return helper.make_graph(nodes, kind, [], [helper.make_tensor_value_info(f"o_{kind}", TensorProto.FLOAT, None)])


@pytest.fixture
def session():
    nodes = [
        helper.make_node("Relu", ["x"], ["middle"]),
        helper.make_node("ReduceSum", ["middle"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["chosen"]),
        helper.make_node("If", ["chosen"], ["y"], then_branch=branch("Exp"), else_branch=branch("Neg")),
    ]
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])]
    gives = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    zero = helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])
    graph = helper.make_graph(nodes, "net", given, gives, [zero])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("pattern", "number"), [("**", 4), ("re:^(o_.*|y)$", 2), ("{o_,mid}*", 2)])
def test_a_pattern_for_many(session, pattern, number):
    """What a pattern would have chosen in the branches is counted, and the warning says what to do."""
    memory = tt.Memory()
    with pytest.warns(tt.TensortapWarning, match=rf"^{number} of .* inside If, Loop or Scan.*simplify the model"):
        tap = tt.watch(session, pattern, "y", to=memory)
    with tap:
        session.run(None, {"x": np.ones(3, np.float32)})
    assert tap.counts["unseen_nodes"] == number
    assert "y:output" in {str(record.place) for record in memory.records}


def test_a_tensor_by_its_name(session):
    """Nothing is counted where nothing inside was asked for; a tensor inside that is named is refused, with why."""
    with tt.watch(session, "middle", to=tt.Memory()) as tap:
        session.run(None, {"x": np.ones(3, np.float32)})
    assert tap.counts == {}
    with pytest.raises(tt.TensortapError, match="is inside the If node"):
        tt.watch(session, "in_Exp", to=tt.Memory())
