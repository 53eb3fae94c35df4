"""JSON files with a checksum of their content: `run.json` and each rank's `_rank.json`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, Final

from tensortap.store.files import load_json

_CHECKSUM: Final = "crc32"  # of all that the file says besides
_CHECKED: Final = "checked"  # says that there is a checksum: its own name may be what was damaged


def encode(content: Mapping[str, Any]) -> bytes:
    """Return the text of a file with this content and its checksum."""
    plain = _plain(content)
    return json.dumps({_CHECKED: True, **plain, _CHECKSUM: _checksum(plain)}, indent=1).encode()


def decode(data: bytes) -> tuple[Any, str]:
    """Return the content of a file, and what is wrong with it; raise ValueError if it is not JSON.

    >>> decode(encode({"schema": 1}))
    ({'schema': 1}, '')
    >>> decode(encode({"schema": 1}).replace(b"1", b"2", 1))
    ({'schema': 2}, 'its checksum does not hold: what it says may be wrong')
    """
    said = load_json(data)
    if not isinstance(said, dict) or not {_CHECKSUM, _CHECKED} & said.keys():  # older versions wrote none
        return said, ""
    content = _plain(said)
    holds = said.get(_CHECKSUM) == _checksum(content) and said.get(_CHECKED, True) is True
    return content, "" if holds else "its checksum does not hold: what it says may be wrong"


def _plain(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in (_CHECKSUM, _CHECKED)}


def _checksum(content: Mapping[str, Any]) -> int:
    """Return the checksum of the content as a reader will have it: keys are texts there."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())
