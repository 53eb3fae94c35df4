"""Say why a pattern chose no site, and which one would."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tensortap.errors import nearest
from tensortap.select.patterns import Candidate, Pattern, no_port
from tensortap.select.ports import PORTS


def explain(pattern: Pattern, candidates: Sequence[Candidate]) -> str:
    """Return the error message: the sites that the pattern was compared with, and patterns that would match."""
    if not candidates:
        return f"{pattern.text!r} matches nothing: the model offers no sites"
    found = next((candidate for candidate in candidates if candidate.ports and pattern.finds(candidate)), None)
    if found:
        return _wrong_port(pattern, found, candidates)
    if pattern.kind == "path" and ":" in pattern.head:
        return no_port(pattern.text)
    return f"{pattern.text!r} matches none of {len(candidates)} sites." + _instead(pattern, candidates)


def _wrong_port(pattern: Pattern, found: Candidate, candidates: Sequence[Candidate]) -> str:
    what = "" if found.path == pattern.head else f"{pattern.text!r} matches nothing: "
    wanted = " or ".join(port for port in PORTS if port in pattern.ports)
    below = [repr(text) for text in _fitting(pattern, [f"{pattern.head}.*"], candidates)]
    write = " or ".join([f"'{pattern.head}:{found.ports[0]}'", *below])
    return f"{what}{found.path!r} has no {wanted}; it has {', '.join(found.ports)}: write {write}"


def _instead(pattern: Pattern, candidates: Sequence[Candidate]) -> str:
    """Suggest patterns that would have matched, or else name some sites."""
    head = pattern.head
    known = [candidate.path for candidate in candidates if candidate.ports]
    better = []
    if pattern.kind == "path":
        better = [_respelt(head, known), f"**.{head}", f"{head}.*", *nearest(head, known)]
    elif pattern.kind == "type":
        known = list(dict.fromkeys(name for candidate in candidates for name in candidate.types))
        better = [f"type:{name}" for name in nearest(head.removeprefix("type:"), known)]
    fitting = " or ".join(map(repr, _fitting(pattern, better, candidates)[:3]))
    return f" Did you mean {fitting}?" if fitting else f" There are {', '.join(map(repr, known[:5]))} …"


def _fitting(pattern: Pattern, heads: Iterable[str], candidates: Sequence[Candidate]) -> list[str]:
    """Return those heads, with the pattern's port, that choose something."""
    texts = dict.fromkeys(head + pattern.text.removeprefix(pattern.head) for head in heads)
    return [text for text in texts if _chooses(Pattern.parse(text), candidates)]


def _chooses(pattern: Pattern, candidates: Sequence[Candidate]) -> bool:
    return any(pattern.matches(candidate, port) for candidate in candidates for port in candidate.ports)


def _respelt(head: str, paths: Iterable[str]) -> str:
    """Replace each segment that occurs nowhere by the nearest that does."""
    words = dict.fromkeys(word for path in paths for word in path.split("."))
    known = [
        word if word in words or re.search(r"[*?{]", word) else [*nearest(word, words, 1), word][0]
        for word in head.split(".")
    ]
    return ".".join(known)
