"""ONNX Runtime sessions."""
