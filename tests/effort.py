"""How many random examples a property gets: a quarter of them in `make test`, all of them in `make thorough`."""

from __future__ import annotations

import os


def examples(count: int) -> int:
    """Return how many of so many examples to draw."""
    return count if os.environ.get("TENSORTAP_THOROUGH") else count // 4
