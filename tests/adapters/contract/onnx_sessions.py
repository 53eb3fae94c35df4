"""Sessions of ONNX Runtime for tests, small ones and some that packages carry."""

from __future__ import annotations

from importlib import metadata

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

import tensortap as tt

CPU = ["CPUExecutionProvider"]


def value(name, shape, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, shape)


def session(nodes, given, gives, constants=(), **options):
    graph = helper.make_graph(nodes, "g", given, gives, list(constants))
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    chosen = onnxruntime.SessionOptions()
    for name, setting in options.items():
        setattr(chosen, name, setting)
    return onnxruntime.InferenceSession(made.SerializeToString(), chosen, providers=CPU)


def records(memory):
    return {str(record.place): record for record in memory.records}


def watched(subject, *probes, **options):
    memory = tt.Memory()
    return memory, tt.watch(subject, *probes, to=memory, strict=True, **options)


def packaged(package, file):
    """A model that a package from the index carries; the package itself is not imported."""
    try:
        found = [path for path in metadata.files(package) or () if path.name == file]
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return str(found[0].locate())


RNG = np.random.default_rng(0)
REAL = {
    "silero": ("silero-vad", "silero_vad_16k_op15.onnx", 30, {
        "input": RNG.normal(size=(1, 576)).astype(np.float32), "state": np.zeros((2, 1, 128), np.float32),
        "sr": np.array(16000),
    }),
    "magika": ("magika", "model.onnx", 90, {"bytes": RNG.integers(0, 256, size=(1, 2048)).astype(np.int32)}),
    "ocr-cls": ("rapidocr-onnxruntime", "ch_ppocr_mobile_v2.0_cls_infer.onnx", 150, {
        "x": RNG.normal(size=(1, 3, 48, 192)).astype(np.float32),
    }),
    "ocr-det": ("rapidocr-onnxruntime", "ch_PP-OCRv4_det_infer.onnx", 250, {
        "x": RNG.normal(size=(1, 3, 64, 64)).astype(np.float32),
    }),
}  # fmt: skip
