"""Globs of patterns as regular expressions: `*`, `?`, `**` and `{a,b}`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tensortap.errors import PatternError

_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_ALTERNATIVES = 1000


def path_regex(text: str) -> re.Pattern[str]:
    """Return a regular expression for paths with a dot after every segment (see `fits`); the root has no segment.

    The text itself comes first: a path that contains glob characters is still found by its own name.
    """
    itself = re.escape(f"{text}.") if text else ""
    return re.compile("|".join(dict.fromkeys([itself, *map(_segments, alternatives(text))])), re.DOTALL)


def literal_paths(text: str) -> frozenset[str] | None:
    """Return all paths that `path_regex` of a text matches; None where a wildcard may match any number.

    >>> sorted(literal_paths("blocks.{0,7}.fc"))
    ['blocks.0.fc', 'blocks.7.fc', 'blocks.{0,7}.fc']
    """
    return None if "*" in text or "?" in text else frozenset([text, *alternatives(text)])


def fits(regex: re.Pattern[str], path: str) -> bool:
    """Return whether a path matches a regular expression that `path_regex` made."""
    return regex.fullmatch(f"{path}." if path else "") is not None


def word_regex(words: Iterable[str]) -> re.Pattern[str]:
    """Match names without segments; an empty list matches nothing."""
    globs = [_segment(word, ".") for text in words for word in alternatives(text)]
    return re.compile("|".join(globs) or "(?!)", re.DOTALL)


def slot_regex(text: str) -> re.Pattern[str] | None:
    """Match a slot and everything below it; None for no slot."""
    slots = "|".join(_segment(slot, r"[^.\[\]]") for slot in alternatives(text))
    return re.compile(rf"(?:{slots})(?:[.\[].*)?", re.DOTALL) if text else None


def _segments(text: str) -> str:
    chunks = [""]
    for segment in text.split(".") if text else []:
        if segment == "**":
            chunks.append("")
        else:
            chunks[-1] += _segment(segment, "[^.]") + r"\."
    return _starred(chunks, r"(?:[^.]*\.)")


def _segment(text: str, character: str) -> str:
    chunks = re.split(r"\*+", text)
    return _starred(["".join(character if c == "?" else re.escape(c) for c in chunk) for chunk in chunks], character)


def _starred(chunks: Sequence[str], unit: str) -> str:
    """Join the chunks with any number of units between them.

    A chunk has a fixed number of units, so its first fit is as good as any: all but the last are taken for good
    (atomic groups), and the time to match stays far from exponential.
    """
    first, *rest = chunks
    middle = "".join(f"(?>{unit}*?{chunk})" for chunk in rest[:-1])
    return first + middle + (f"{unit}*{rest[-1]}" if rest else "")


def alternatives(text: str) -> list[str]:
    """Expand `a.{b,c}` to `a.b` and `a.c`, nested braces too; a brace without its partner is an ordinary character."""
    done: dict[str, None] = {}
    todo = [text]
    while todo:
        word = todo.pop()
        if braces := _BRACES.search(word):
            todo += [word[: braces.start()] + part + word[braces.end() :] for part in braces[1].split(",")]
        else:
            done[word] = None
        if len(done) + len(todo) > _MOST_ALTERNATIVES:
            raise PatternError(f"{text!r} must have at most {_MOST_ALTERNATIVES} alternatives: write * or re: instead")
    return list(done)
