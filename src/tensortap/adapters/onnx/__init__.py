"""The ONNX Runtime adapter: an instrumented copy of a session shows the tensors inside its optimised graph.

May import `adapters`' shared modules and everything below `adapters`; loads ONNX Runtime and onnx.
"""
