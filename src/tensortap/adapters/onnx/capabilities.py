"""What ONNX Runtime can show."""

from typing import Final

from tensortap.adapters.capabilities import Capabilities

_NO_GRADIENTS: Final = "a session only infers; watch the model it was exported from"
_OWN_TENSORS: Final = "every tensor of the graph has a name, and is a site of its own"
CAPABILITIES: Final = Capabilities(
    "onnx",
    "ONNX Runtime",
    lacks={
        "grad_output": _NO_GRADIENTS,
        "grad_input": _NO_GRADIENTS,
        "grad": _NO_GRADIENTS,
        "update": _NO_GRADIENTS,
        "op": "every node's tensors are sites already; choose them by the kind of node: 'type:MatMul'",
        "nested": _OWN_TENSORS,
        "reused": _OWN_TENSORS,
        "shared": _OWN_TENSORS,
        "check_model": "check the model it was exported from: tensortap.check_model(model, batch)",
        "context": _NO_GRADIENTS,
        "blocks": "every tensor of the graph has a name: watch the session",
        "compiled": "every tensor of the graph has a name: watch the session",
        "global_stats": "merge what each rank recorded: tensortap.open_run(path).merged(over='ranks')",
    },
    notes={
        "output": "as optimised: tensors that were fused away, or lie inside `If` and `Loop`, are named and counted",
        "exact": "checked at the first run that is observed",
        "steps": "`session.run`; other ways to run are counted, not seen",
    },
)
