"""The registry of ports: the tensors of a module, an operation, a parameter or a buffer that can be observed.

To add a port, add its entry here and let the adapters that can give it offer it. Site patterns, the table of
capabilities, rules, comparison and the viewer read this list; nothing else holds one.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

Stage = Literal["parameter", "forward", "backward", "gradient", "update", "buffer"]
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
"""The stages of a step, in order: what goes wrong in one shows in those that follow."""


class PortInfo(NamedTuple):
    """One port: when its tensors occur, what they belong to, and how people are told about them.

    >>> PORT_INFO["grad_input"].when, PORT_INFO["grad"].of
    ('backward', 'parameter')
    """

    name: str
    when: Literal["forward", "backward", "optimizer"]
    of: Literal["module", "parameter", "buffer"]
    label: str
    plural: str
    stage: Stage = "forward"
    operations: bool = False  # operations have it too, not only modules
    gradient: bool = False
    needs_backward: bool = False  # without a backward there is nothing to see
    beside: tuple[str, ...] = ()  # ports that are shown next to it, the first one recorded
    optional: str = ""  # for ports that adapters must name to give: what to write where one does not

    def as_json(self) -> dict[str, Any]:
        """Return the entry as the viewer reads it."""
        return {"name": self.name, "label": self.label, "gradient": self.gradient, "beside": list(self.beside)}


_REGISTRY: Final = (
    PortInfo("output", "forward", "module", "output", "outputs", operations=True, beside=("grad_output", "grad")),
    PortInfo("input", "forward", "module", "input", "inputs", operations=True, beside=("grad_input",)),
    PortInfo(
        "grad_output", "backward", "module", "gradient of the output", "gradients of outputs",
        stage="backward", operations=True, gradient=True, needs_backward=True, beside=("output",),
    ),
    PortInfo(
        "grad_input", "backward", "module", "gradient of the input", "gradients of inputs",
        stage="backward", operations=True, gradient=True, needs_backward=True, beside=("input",),
    ),
    PortInfo(
        "param", "optimizer", "parameter", "parameter", "parameters", stage="parameter", beside=("grad", "update")
    ),
    PortInfo(
        "grad", "optimizer", "parameter", "gradient", "gradients of parameters",
        stage="gradient", gradient=True, needs_backward=True, beside=("param",),
    ),
    PortInfo(
        "update", "optimizer", "parameter", "update", "updates of parameters",
        stage="update", needs_backward=True, beside=("param",),
    ),
    PortInfo(
        "buffer", "optimizer", "buffer", "buffer", "buffers", stage="buffer",
        optional="a layer's state is an array with the port 'param', like its weights: write 'bn.moving_mean:param'",
    ),
)  # fmt: skip

PORT_INFO: Final = {port.name: port for port in _REGISTRY}
PORTS: Final = tuple(PORT_INFO)
OP_PORTS: Final = tuple(port.name for port in _REGISTRY if port.operations)
MODULE_PORTS: Final = tuple(port.name for port in _REGISTRY if port.of == "module")
PARAMETER_PORTS: Final = tuple(port.name for port in _REGISTRY if port.of == "parameter")
BUFFER_PORTS: Final = tuple(port.name for port in _REGISTRY if port.of == "buffer")
MEMBER_PORTS: Final = tuple(port.name for port in _REGISTRY if port.of != "module")  # paths end in an attribute's name
FORWARD_PORTS: Final = tuple(port.name for port in _REGISTRY if port.when == "forward")
RESULT_PORTS: Final = ("output", "grad_output")  # the ports of named values
GRADIENT_PORTS: Final = tuple(port.name for port in _REGISTRY if port.gradient)
FORWARD_STAGE: Final = STAGES.index("forward")
_STAGE_OF: Final = {port.name: STAGES.index(port.stage) for port in _REGISTRY}
NEED_BACKWARD: Final = frozenset(port.name for port in _REGISTRY if port.needs_backward)


def is_backward(port: str) -> bool:
    """Return whether a port's values are made in the backward pass; False for an unknown port."""
    known = PORT_INFO.get(port)
    return known is not None and known.when == "backward"


def stage_of(port: str) -> int:
    """Return the place in `STAGES` of the stage that makes a port's values; an unknown port's are made in forward.

    >>> [stage_of(port) for port in ("param", "output", "grad_input", "grad", "update")]
    [0, 1, 2, 3, 4]
    """
    return _STAGE_OF.get(port, FORWARD_STAGE)


def module_of(path: str, port: str) -> str:
    """Return the path of the module that a site belongs to: parameters and buffers hang on one.

    >>> module_of("fc.weight", "grad"), module_of("fc", "output")
    ('fc', 'fc')
    """
    return path.rpartition(".")[0] if port in MEMBER_PORTS else path
