"""An extension of griffe for the site: examples in docstrings become blocks of code, not quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> )\S?.*\S.*\n?)*)+", re.MULTILINE)


class FenceDoctests(griffe.Extension):
    """Put fences around the examples of every docstring."""

    def on_object(self, *, obj: Any, **more: Any) -> None:
        """Change the docstring that is shown, not the source."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = EXAMPLE.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    return f"```pycon\n{found[0].rstrip()}\n```\n"
