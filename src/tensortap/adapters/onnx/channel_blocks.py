"""Map the tensors between convolutions that run in blocks of channels to the tensors of the model.

On a CPU ONNX Runtime may let convolutions hand each other tensors whose channels lie in blocks, under new names. A node
that such a graph has anyway, ReorderOutput, undoes that; an instrumented session gets one for each tensor wanted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import onnx

DOMAIN: Final = "com.microsoft.nchwc"
_WIDEST: Final = 16  # channels in a block, or a divisor of it
_SUFFIX: Final = "_nchwc"  # a node in blocks has the name of the tensor that it made before


class ChannelBlocks(NamedTuple):
    """`names` gives tensors in blocks their plain name; `made` has those that no node of the graph gives plainly."""

    names: dict[str, str]
    made: dict[str, tuple[str, int]]

    def is_reorder(self, node: Any) -> bool:
        """Return whether a node only changes the memory layout of a tensor."""
        return _is(node, "ReorderInput") or (_is(node, "ReorderOutput") and node.output[0] in self.names.values())

    def is_blocked(self, node: Any) -> bool:
        """Return whether a node's output is stored in blocks and its plain form is not known."""
        return node.domain == DOMAIN and node.op_type != "ReorderOutput" and node.output[0] not in self.names

    def plain(self, name: str) -> str:
        """Return a tensor's plain name."""
        return self.names.get(name, name)

    def unordered(self, name: str) -> str:
        """Return a tensor with the same elements in any order: in blocks, unless channels were padded for that."""
        token, channels = self.made.get(name, (name, 0))
        return name if channels % _WIDEST else token

    def reorders(self, names: Iterable[str]) -> Iterator[Any]:
        """Return the nodes that make these tensors plain, where needed."""
        for name in names:
            if name in self.made:
                token, channels = self.made[name]
                yield onnx.helper.make_node("ReorderOutput", [token], [name], domain=DOMAIN, channels=channels)


def channel_blocks_of(graph: Any, loaded: Any) -> ChannelBlocks:
    """Find them from the optimised graph and the model as it was loaded."""
    if not any(node.domain == DOMAIN for node in graph.node):
        return ChannelBlocks({}, {})
    names = {node.input[0]: node.output[0] for node in graph.node if _is(node, "ReorderOutput")}
    made = {}
    kinds = {name: node.op_type for node in loaded.graph.node for name in node.output}
    channels = _channels(loaded)
    for node in graph.node:
        if _is(node, "ReorderInput"):
            names[node.output[0]] = names.get(node.input[0], node.input[0])
        elif node.domain == DOMAIN and node.output[0] not in names:
            name = node.name.removesuffix(_SUFFIX)
            if name in channels and name != node.name and _still_makes(node, kinds.get(name, "")):
                names[node.output[0]] = name
                made[name] = (node.output[0], channels[name])
    return ChannelBlocks(names, made)


def _still_makes(node: Any, kind: str) -> bool:
    """Return whether a node makes the tensor that it is named after, that is, no sum or activation was fused
    into it.
    """
    activation = next((a.s.decode() for a in node.attribute if a.name == "activation"), None)
    return activation in (None, kind) and not (node.op_type == "Conv" and len(node.input) > 3)


def _channels(loaded: Any) -> dict[str, int]:
    """Return how many channels each tensor has, as far as shapes can be inferred."""
    with contextlib.suppress(Exception):
        loaded = onnx.shape_inference.infer_shapes(loaded)
    dims = {value.name: value.type.tensor_type.shape.dim for value in (*loaded.graph.value_info, *loaded.graph.output)}
    return {name: shape[1].dim_value for name, shape in dims.items() if len(shape) == 4 and shape[1].dim_value}


def _is(node: Any, kind: str) -> bool:
    return bool(node.domain == DOMAIN and node.op_type == kind)
