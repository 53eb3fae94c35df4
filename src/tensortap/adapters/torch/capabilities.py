"""What PyTorch can show."""

from typing import Final

from tensortap.adapters.capabilities import Capabilities

CAPABILITIES: Final = Capabilities(
    "torch",
    "PyTorch",
    lacks={},
    optional=("buffer",),
    notes={
        "exact": "compiled models too, in fp32 on the CPU, in every model that we tried",
        "op": "not inside compiled code; that is reported",
    },
)
