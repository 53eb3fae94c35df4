"""Read autograd's graph: the operations behind a tensor, the parameters that a loss depends on, and adjacent layers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from torch import Tensor, nn

_TRANSPARENT: Final = frozenset(
    f"{name}Backward0"
    for name in (
        "View", "UnsafeView", "Reshape", "ReshapeAlias", "Squeeze", "Unsqueeze", "Transpose", "Permute", "T", "Clone",
        "Slice", "Select", "Index", "ToCopy", "Alias", "Expand", "Contiguous", "Narrow", "Cat", "Stack", "Gather",
        "Detach", "AsStrided", "Unbind", "Split", "Flatten",
    )
) | {"SqueezeBackward1", "SqueezeBackward2", "ViewBackward1", "UnbindBackward0"}  # fmt: skip
_LINEAR: Final = {"AddmmBackward0": 1, "MmBackward0": 0, "LinearBackward0": 0}  # where the input is among the inputs
_PRODUCTS: Final = ("Addmm", "Mm", "Linear", "Bmm", "Baddbmm", "Mv", "Convolution", "Trilinear")
_NORMS: Final = ("PowBackward0", "LinalgVectorNormBackward0", "AbsBackward0", "MulBackward0", "NormBackward1")
_ACTIVATIONS: Final = (
    "Relu", "LeakyRelu", "Elu", "Gelu", "Silu", "Tanh", "Sigmoid", "Softplus", "Hardtanh", "Hardswish", "Selu", "Celu",
    "Mish", "PreluKernel", "Softmax", "Exp", "Sin", "Cos", "Glu", "Scaled", "LogSigmoid", "Bmm", "Sqrt", "Cudnn",
    "ThnnFused", "Mkldnn", "Threshold", "Hardsigmoid", "Softsign", "Clamp", "Rrelu", "Erf",
)  # fmt: skip
LOSS_NODES: Final = frozenset((
    "NllLossBackward0", "NllLoss2DBackward0", "MseLossBackward0", "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0", "SmoothL1LossBackward0", "HuberLossBackward0", "KlDivBackward0",
))  # fmt: skip
_LEAF: Final = "torch::autograd::AccumulateGrad"
_MOST_NODES: Final = 4000
_MOST_ATTENTIONS: Final = 6

NameOf = Callable[[Any], str | None]


class NodeOutput:
    """Stand in for the tensor that a node has produced."""

    def __init__(self, node: Any) -> None:
        self.grad_fn = node


def operations_before(tensor: Any, most: int = 6) -> list[str]:
    """Return the operations that produced a tensor, the nearest first, without those that only rearrange."""
    return [_plain_name(node) for node in _line_of(getattr(tensor, "grad_fn", None), most)]


def softmax_axes(tensor: Any) -> list[tuple[str, int, int, int]]:
    """Return each (log-)softmax on the way to a tensor: its name, its axis, the number of axes, the axis' length.

    The length is that of the softmax's input, which later operations may have shortened; 0 if unknown.
    """
    found = []
    for node in _line_of(getattr(tensor, "grad_fn", None), 6):
        if node.name() in ("SoftmaxBackward0", "LogSoftmaxBackward0"):
            shape = _shape_of(node, 0) or ()
            axis = int(node._saved_dim)
            axis = axis - (1 << 64) if axis >= 1 << 63 else axis
            axis = axis % len(shape) if shape else axis
            found.append((_plain_name(node), axis, len(shape), shape[axis] if shape else 0))
    return found


def nearest_parameter(tensor: Any, name_of: NameOf) -> str | None:
    """Return the name of the parameter nearest to a tensor in the graph: its owner produced it."""
    for node in _breadth_first(getattr(tensor, "grad_fn", None), 200):
        variable = getattr(node, "variable", None)
        if variable is not None and (name := name_of(variable)) is not None:
            return name
    return None


class LossGraph:
    """The graph below a loss, gone through once."""

    def __init__(self, loss: Tensor, name_of: NameOf) -> None:
        self.top: list[str] = []  # the operations nearest to the loss
        self.reached: set[int] = set()  # ids of the parameters that the loss depends on
        self.complete = True
        self.linear_pairs: list[tuple[str, str]] = []  # linear layers that follow each other with nothing between
        self.broadcasts: list[dict[str, Any]] = []
        self.penalty = False  # parameters themselves are added to the loss
        self.softmax_before: list[str] = []  # linear layers whose input is a softmax's output
        self.activations = 0
        self.weighted = 0  # linear layers and convolutions
        self.multiplied: set[str] = (
            set()
        )  # parameters that are a factor of a product, as kernels are and tables are not
        self.unnamed: list[Any] = []  # parameters of no known model
        self.attentions: list[Any] = []  # nodes of the softmax of an attention, or of a fused one
        self.upright: set[Any] = set()  # those of them whose last axis the product sums over
        self._uses: Counter[Any] = Counter()
        nodes = list(_breadth_first(loss.grad_fn, _MOST_NODES, self._uses))
        for count, node in enumerate(nodes, 1):
            self._visit(node, count, name_of)
        self.complete = len(nodes) < _MOST_NODES
        self.negated = self._negated(loss.grad_fn)
        self.scaled = any(name in ("Div", "Mul") for name in self._line_names(loss.grad_fn))

    def _visit(self, node: Any, count: int, name_of: NameOf) -> None:
        name = node.name()
        if count <= 16:
            self.top.append(_plain_name(node))
        if name == _LEAF:
            self.reached.add(id(node.variable))
            if isinstance(node.variable, nn.Parameter) and len(self.unnamed) < 20 and name_of(node.variable) is None:
                self.unnamed.append(node.variable)
        elif name in _LINEAR:
            self.weighted += 1
            self._pair(node, name_of)
        if name.startswith(_PRODUCTS):
            self._factors(node, name_of)
        if name == "ConvolutionBackward0":
            self.weighted += 1
        elif name.startswith(_ACTIVATIONS):
            self.activations += 1
            self._attention(node, name)
        elif count <= 40 and name in ("SubBackward0", "MulBackward0", "AddBackward0"):
            self._broadcast(node)
        if count <= 80 and name in _NORMS and any(p is not None and p.name() == _LEAF for p, _ in node.next_functions):
            self.penalty = True

    def _factors(self, node: Any, name_of: NameOf) -> None:
        for parent, _ in node.next_functions[-2 if node.name().startswith(("Conv", "Lin")) else -1 :]:
            variable = getattr(_skip(parent), "variable", None)
            if variable is not None and (name := name_of(variable)) is not None:
                self.multiplied.add(name)

    def _pair(self, node: Any, name_of: NameOf) -> None:
        below = _skip(node.next_functions[_LINEAR[node.name()]][0], self._uses)
        layer = node.name() != "MmBackward0"  # without a bias it is a lookup in a memory
        if layer and below is not None and below.name() == "SoftmaxBackward0" and (weight := _weight(node, name_of)):
            self.softmax_before.append(weight[0])
        if below is None or below.name() not in _LINEAR:
            return
        first, last = _weight(below, name_of), _weight(node, name_of)
        if first and last and first[0] != last[0] and (last[0], first[0]) not in self.linear_pairs:
            hidden, inner, outer = last[1][-1], first[1][-1], last[1][0]
            if hidden >= min(inner, outer):  # a narrow layer between two wide ones is a factorisation
                self.linear_pairs.append((first[0], last[0]))

    def _attention(self, node: Any, name: str) -> None:
        if len(self.attentions) >= _MOST_ATTENTIONS:
            return
        if name.startswith("ScaledDotProduct"):
            self.attentions.append(node)
        elif name == "BmmBackward0" and (below := _softmax_in(node.next_functions[0][0])) is not None:
            self.attentions.append(below)
            if not _is_turned(node.next_functions[0][0]):
                self.upright.add(below)

    def _broadcast(self, node: Any) -> None:
        shape = _shape_of(node, 0)
        given = [(_shape_of(parent, slot) or ()) for parent, slot in node.next_functions if parent is not None]
        if shape is None or len(shape) < 2 or not given or len(self.broadcasts) >= 4:
            return
        if all(_numel(other) < _numel(shape) and _numel(other) > 1 for other in given):
            self.broadcasts.append({"op": _plain_name(node), "result": list(shape), "inputs": [list(g) for g in given]})

    def _line_names(self, node: Any) -> list[str]:
        names: list[str] = []
        while node is not None and len(names) < 4 and node.name() not in LOSS_NODES:
            names.append(_plain_name(node))
            node = node.next_functions[0][0] if node.next_functions else None
        return names

    def _negated(self, node: Any) -> bool:
        flipped = False
        for _ in range(5):
            if node is None:
                return False
            if node.name() in LOSS_NODES:
                return flipped
            flipped ^= node.name() == "NegBackward0"
            flipped ^= node.name() == "MulBackward0" and _negative_factor(node)
            flipped ^= node.name() == "RsubBackward1"
            node = node.next_functions[0][0] if node.next_functions else None
        return False


def _softmax_in(node: Any) -> Any:
    """Return the softmax whose output is the weight of a product, through dropout and operations that rearrange."""
    for _ in range(8):
        if node is None or node.name() in ("SoftmaxBackward0", "SafeSoftmaxBackward0"):
            return node
        if node.name() not in _TRANSPARENT and node.name() not in ("MulBackward0", "NativeDropoutBackward0"):
            return None
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return None


def _is_turned(node: Any) -> bool:
    """Return whether weights are transposed on their way from the softmax to the product."""
    for _ in range(8):
        if node is None or node.name() in ("SoftmaxBackward0", "SafeSoftmaxBackward0"):
            return False
        if node.name() in ("TransposeBackward0", "PermuteBackward0", "TBackward0", "SelectBackward0"):
            return True
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    return True


def _negative_factor(node: Any) -> bool:
    other = getattr(node, "_saved_other", None)
    return isinstance(other, Tensor) and other.numel() == 1 and float(other) < 0


def _weight(node: Any, name_of: NameOf) -> tuple[str, tuple[int, ...]] | None:
    """Return the name and shape (out, in) of the weight of a linear node."""
    slots = [parent for index, (parent, _) in enumerate(node.next_functions) if index != _LINEAR[node.name()]]
    for parent in reversed(slots):
        leaf = _skip(parent)
        variable = getattr(leaf, "variable", None)
        if variable is not None and variable.dim() == 2 and (name := name_of(variable)) is not None:
            return name, tuple(variable.shape)
    return None


def _line_of(node: Any, most: int) -> Iterator[Any]:
    """Yield the nodes that lead to one, as long as there is one differentiable input."""
    found = 0
    while node is not None and found < most:
        if node.name() not in _TRANSPARENT:
            if hasattr(node, "variable"):
                return
            yield node
            found += 1
            if node.name() in _LINEAR or node.name() in ("ConvolutionBackward0", "BmmBackward0", "EmbeddingBackward0"):
                return
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 or node.name() in _TRANSPARENT else None


def _breadth_first(node: Any, most: int, uses: Counter[Any] | None = None) -> Iterator[Any]:
    """Yield the nodes below one; `uses` counts how many nodes each leads to."""
    waiting, known = deque([node] if node is not None else []), {node}
    while waiting and most:
        most -= 1
        node = waiting.popleft()
        yield node
        for parent, _ in node.next_functions:
            if uses is not None:
                uses[parent] += 1
            if parent is not None and parent not in known:
                known.add(parent)
                waiting.append(parent)


def _skip(node: Any, uses: Mapping[Any, int] | None = None) -> Any:
    """Return the node before operations that rearrange; with `uses`, None if another node uses it too (a residual
    branch).
    """
    for _ in range(8):
        if node is None or (uses is not None and uses[node] > 1):
            return None
        if node.name() not in _TRANSPARENT:
            return node
        parents = [parent for parent, _ in node.next_functions if parent is not None]
        node = parents[0] if len(parents) == 1 else None
    return node


def _shape_of(node: Any, slot: int) -> tuple[int, ...] | None:
    metadata = getattr(node, "_input_metadata", None)
    try:
        return tuple(metadata[slot].shape) if metadata else None
    except (IndexError, RuntimeError):
        return None


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for length in shape:
        total *= length
    return total


def _plain_name(node: Any) -> str:
    return str(node.name()).removesuffix("0").removesuffix("1").removesuffix("2").removesuffix("Backward")
