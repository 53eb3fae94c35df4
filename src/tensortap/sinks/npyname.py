"""File names for kept tensors: safe on every system, unique, and readable where the site's name allows it."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from tensortap.record.step import Record

_UNSAFE: Final = re.compile(r"[^a-z0-9._]")
_LONGEST: Final = 150
_RESERVED: Final = frozenset(
    ["con", "prn", "aux", "nul", *(f"{device}{n}" for device in ("com", "lpt") for n in range(10))]
)


def file_name(record: Record, kind: str) -> str:
    """`step-00000012/blocks.3.mlp-output-full`, without suffix; the same key has the same name in every run.

    Where a name had to be changed or shortened (capitals too: not every file system tells them apart) a digest of
    the whole key keeps it unique.
    """
    place = record.place
    parts = [place.site, place.port + place.slot, kind]
    extra = [f"{word}{n}" for word, n in (("call", record.call), ("rank", record.rank)) if n]
    extra += ["recomputed"] if record.recomputed else []
    safe = [_safe(part) for part in parts]
    stem = "-".join([*safe, *extra])
    if safe != parts or len(stem) > _LONGEST:
        stem = f"{stem[:_LONGEST]}~{_digest([*parts, *extra])}"
    return f"step-{record.step:08d}/{stem}"


def _safe(part: str) -> str:
    part = _UNSAFE.sub("_", part.lower()).strip(".") or "_"
    return f"_{part}" if part.partition(".")[0] in _RESERVED else part


def _digest(parts: list[str]) -> str:
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=6).hexdigest()
