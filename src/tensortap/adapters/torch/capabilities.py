"""What PyTorch can show."""

from typing import Final

from tensortap.adapters.capabilities import Capabilities

CAPABILITIES: Final = Capabilities(
    "torch",
    "PyTorch",
    lacks={},
    notes={
        "exact": "in eager mode",
        "output": "not inside what torch.compile made, which is reported",
    },
)
