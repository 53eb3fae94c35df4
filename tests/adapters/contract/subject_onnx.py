"""The contract's network as a session of ONNX Runtime."""

from __future__ import annotations

import onnx
import onnxruntime
import reference
from onnx import TensorProto, helper, numpy_helper

import tensortap as tt


def dense(name, given, gives=None):
    return helper.make_node("Gemm", [given, f"{name}.weight", f"{name}.bias"], [gives or name], gives or name)


def graph():
    """The network as nodes: a second call of a layer is one more node with the same weights."""
    nodes = [
        dense("fc1", "x"),
        helper.make_node("Relu", ["fc1"], ["act"]),
        dense("blocks.0", "act"),
        helper.make_node("Relu", ["blocks.0"], ["act_1"]),
        dense("blocks.1", "act_1"),
        helper.make_node("Relu", ["blocks.1"], ["act_2"]),
        helper.make_node("Split", ["act_2"], ["left", "right"], axis=1, num_outputs=2),
        helper.make_node("Concat", ["left", "right"], ["both"], axis=1),
        dense("blocks.0", "both", "blocks.0_1"),
        dense("head", "blocks.0_1"),
    ]
    constants = [
        numpy_helper.from_array(value, f"{name}.{part}")
        for name, pair in reference.weights().items()
        for part, value in zip(("weight", "bias"), pair, strict=True)
    ]
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", reference.GIVEN])
    gives = helper.make_tensor_value_info("head", TensorProto.FLOAT, ["n", reference.OUT])
    return helper.make_graph(nodes, "net", [given], [gives], constants)


def model():
    return helper.make_model(graph(), opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


class Subject:
    framework = "onnx"
    act = "Relu"
    weight = "head.weight"

    def __init__(self, level="ORT_ENABLE_BASIC"):  # more would fuse activations into the layers before them
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        content = model()
        onnx.checker.check_model(content)
        self.model = onnxruntime.InferenceSession(content.SerializeToString(), options, ["CPUExecutionProvider"])
        self.names = {name: name for name in ("fc1", "act", "blocks.0", "blocks.1", "head")}

    def watch(self, *probes, **options):
        return tt.watch(self.model, *probes, **options)

    def arguments(self, x):
        return {"x": x}

    def array(self, array):
        return array

    def call(self, x):
        return self.model.run(None, {"x": x})[0]

    def fail(self, x):
        self.call(x[:, :-1])

    def parameters(self):
        return self.model._model_bytes

    def traces(self):
        return {name: id(value) for name, value in vars(self.model).items()}
