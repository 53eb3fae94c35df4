"""Where: sites, and the patterns that choose among them.

A site is `path:port`. The port is `output` unless named; the root module is the empty path, `:output`.

    layer1                    the module layer1 itself
    blocks.*.mlp              * within a segment, ? one character, {a,b} either
    blocks.**                 blocks and everything below it; `**` alone is every site, the root included
    fc:{input,output}  **:*   ports: see select/ports.py
    enc:output.hidden[1]      a slot inside a nested value, with everything below the slot
    type:*Norm:input          by class name, base classes included
    re:h\\.[0-3]\\.attn:grad    a regular expression for the whole path
    op:softmax  op:@matmul    an operation, a group of operations, in any module
    blocks.*.attn/matmul#1    operation number 1 of that kind in one call of a module
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, NamedTuple

from tensortap.errors import PatternError, nearest, suggest
from tensortap.select.ports import OP_PORTS, PORTS

_PORT = re.compile(r"(?P<path>.*):(?P<port>[\w*?{},]+)(?P<slot>(?:\.[^.\[\]:]+|\[[^\]]*\])*)", re.DOTALL)
_OP = re.compile(r"(?P<path>.*)/(?P<op>[\w@*?{},.-]+)(?:#(?P<number>\d+))?", re.DOTALL)
_BRACES = re.compile(r"\{([^{}]*)\}")
_MOST_ALTERNATIVES = 1000
_NO_GROUPS: Final[Mapping[str, frozenset[str]]] = {}


class Candidate(NamedTuple):
    """What an adapter offers at set-up: one module, parameter or named value, class names most derived first."""

    path: str
    types: tuple[str, ...]
    ports: tuple[str, ...]
    leaf: bool = True


class SiteName(NamedTuple):
    """A full site name in its parts."""

    path: str
    op: str
    number: int | None
    port: str
    slot: str


class Match(NamedTuple):
    """One site that a pattern chose."""

    candidate: Candidate
    port: str
    pattern: Pattern


class Operation(NamedTuple):
    """The `/op#n` part of a pattern."""

    path: re.Pattern[str]
    text: str
    names: re.Pattern[str]
    groups: frozenset[str]
    number: int | None

    def means(self, op: str, groups: Mapping[str, frozenset[str]]) -> bool:
        """Whether it means operations of this kind, wherever they are."""
        return self.names.fullmatch(op) is not None or any(op in groups.get(group, ()) for group in self.groups)

    def lies_in(self, path: str) -> bool:
        """Whether it means operations of the module at `path`, whatever they are."""
        return _fits(self.path, path)

    def matches(self, path: str, op: str, number: int, groups: Mapping[str, frozenset[str]]) -> bool:
        """Whether it means operation `number` of kind `op` under the module `path`."""
        return self.number in (None, number) and self.means(op, groups) and self.lies_in(path)


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Pattern:
    """Chooses sites; parsed once, immutable.

    >>> mlps = Pattern.parse("blocks.*.mlp:{input,output}")
    >>> mlps.matches(Candidate("blocks.3.mlp", ("MLP", "Module"), ("input", "output")), "input")
    True
    >>> Pattern.parse("blocks.**/softmax").matches_op("blocks.3.attn", "softmax", 0, "output")
    True
    """

    text: str
    head: str  # the text without port and slot
    ports: frozenset[str]
    finds: Callable[[Candidate], bool]
    slots: re.Pattern[str] | None = None
    operation: Operation | None = None
    kind: Literal["path", "type", "op", "re", "function"] = "path"

    @staticmethod
    def parse(pattern: PatternLike) -> Pattern:
        """Read a pattern. A callable is given each candidate and chooses outputs; a class means `type:` its name."""
        if isinstance(pattern, Pattern):
            return pattern
        if isinstance(pattern, type):
            pattern = f"type:{pattern.__name__}"
        if isinstance(pattern, str):
            return _parse(pattern)
        if not callable(pattern):
            raise PatternError(f"{pattern!r} is no pattern: use text such as 'blocks.*.mlp:output', or a function")
        name = getattr(pattern, "__name__", type(pattern).__name__)
        return Pattern(name, name, frozenset(["output"]), partial(_asks, pattern, name), kind="function")

    @property
    def is_op(self) -> bool:
        """Whether it can match operations, whose names are known only while the model runs."""
        return self.operation is not None

    @property
    def op(self) -> str:
        """The operation as written, `matmul` or `@matmul`; empty when there is none."""
        return self.operation.text if self.operation else ""

    @property
    def groups(self) -> frozenset[str]:
        """The groups of operations it names, without the `@`."""
        return self.operation.groups if self.operation else frozenset()

    def matches(self, candidate: Candidate, port: str) -> bool:
        """Whether it chooses this port of the candidate."""
        return port in self.ports and port in candidate.ports and self.finds(candidate)

    def matches_slot(self, slot: str) -> bool:
        """Whether it chooses this slot: always when it names none, else the named one and what lies below it."""
        return self.slots is None or self.slots.fullmatch(slot) is not None

    def matches_op(
        self, path: str, op: str, number: int, port: str, groups: Mapping[str, frozenset[str]] = _NO_GROUPS
    ) -> bool:
        """Whether it chooses operation `number` of kind `op` in the module at `path`; `groups` resolves `@name`."""
        return self.operation is not None and port in self.ports and self.operation.matches(path, op, number, groups)

    def __repr__(self) -> str:
        return f"Pattern({self.text!r})"


PatternLike = Pattern | str | type | Callable[[Candidate], bool]


def select(
    patterns: Sequence[PatternLike], candidates: Sequence[Candidate], *, late: bool = False
) -> list[list[Match]]:
    """The sites each pattern chooses, in the candidates' order. One that chooses none raises, unless for operations.

    With `late` the candidates are not all there yet, and none raises.

    >>> sites = [Candidate("fc1", ("Linear",), ("output",)), Candidate("fc2", ("Linear",), ("output",))]
    >>> [[match.candidate.path for match in chosen] for chosen in select(["fc?", "fc2"], sites)]
    [['fc1', 'fc2'], ['fc2']]
    """
    chosen = []
    for pattern in map(Pattern.parse, patterns):
        matches = list(_matches(pattern, candidates))
        if not (matches or late or pattern.is_op):
            raise PatternError(_explain(pattern, candidates))
        chosen.append(matches)
    return chosen


def split(text: str) -> SiteName:
    """The parts of a full site name as records have it. A value named with a slash reads as an operation.

    >>> split("blocks.3.attn/matmul#1:output[0]")
    SiteName(path='blocks.3.attn', op='matmul', number=1, port='output', slot='[0]')
    """
    head, port, slot = _split_port(text)
    found = _find_op(head, port)
    return SiteName(found["path"] if found else head, found["op"] if found else "", _number(found), port, slot)


def _matches(pattern: Pattern, candidates: Iterable[Candidate]) -> Iterator[Match]:
    for candidate in candidates:
        ports = [port for port in candidate.ports if port in pattern.ports]
        if ports and pattern.finds(candidate):
            yield from (Match(candidate, port, pattern) for port in ports)


# Reading a pattern


def _parse(text: str) -> Pattern:
    kind, colon, rest = text.partition(":")
    # `op:output` is the output of a module named op: no operation and no class is called like a port.
    read = _KINDS.get(kind) if colon and rest not in PORTS else None
    return read(text, rest) if read else _parse_path(text)


def _parse_path(text: str) -> Pattern:
    head, port, slot = _split_port(text)
    found = _find_op(head, port)
    operation = _operation(found["path"], found) if found else None
    # A path may itself contain a slash (a named value, a Keras layer), so the whole head is tried on candidates too.
    finds = partial(_has_path, _path_regex(head))
    return Pattern(text, head, _ports(port), finds, _slot_regex(slot), operation)


def _parse_type(text: str, rest: str) -> Pattern:
    name, port, slot = _split_port(rest)
    if not name or ":" in name:
        raise PatternError(_no_port(text) if name else f"{text!r} names no class: write 'type:Linear'")
    finds = partial(_has_type, _word_regex([name]))
    return Pattern(text, f"type:{name}", _ports(port), finds, _slot_regex(slot), kind="type")


def _parse_op(text: str, rest: str) -> Pattern:
    head, port, slot = _split_port(rest)
    found = _OP.fullmatch(f"/{head}")
    if not found or found["path"]:
        fix = f"write {head!r}" if "/" in head else "write 'op:matmul', 'op:matmul#1' or 'op:@matmul'"
        raise PatternError(_no_port(text) if ":" in head else f"{text!r} names no operation: {fix}")
    if not _find_op(f"/{head}", port):
        raise PatternError(f"{text!r}: an operation has no {port}; it has {', '.join(OP_PORTS)}")
    return Pattern(text, f"op:{head}", _ports(port), _never, _slot_regex(slot), _operation("**", found), "op")


def _parse_regex(text: str, rest: str) -> Pattern:
    head, colon, port = rest.rpartition(":")
    if not colon or port not in PORTS:
        head, port = rest, "output"
    try:
        regex = re.compile(head)
    except re.error as error:
        raise PatternError(
            f"{text!r} is no regular expression: {error.msg} at position {error.pos} of {head!r}"
        ) from error
    return Pattern(text, f"re:{head}", frozenset([port]), partial(_has_regex, regex), kind="re")


_KINDS: Final = {"type": _parse_type, "op": _parse_op, "re": _parse_regex}


def _split_port(text: str) -> tuple[str, str, str]:
    """Path, port and slot; what follows the last colon is part of the path when it is no port."""
    found = _PORT.fullmatch(text)
    return (found["path"], found["port"], found["slot"]) if found and _ports(found["port"]) else (text, "output", "")


def _ports(text: str) -> frozenset[str]:
    """The ports that `output`, `grad*` or `{input,output}` mean; none when any part of it is no port."""
    meant = [[port for port in PORTS if _word_regex([word]).fullmatch(port)] for word in _alternatives(text)]
    return frozenset().union(*meant) if all(meant) else frozenset()


def _find_op(head: str, port: str) -> re.Match[str] | None:
    return _OP.fullmatch(head) if _ports(port).intersection(OP_PORTS) else None


def _operation(path: str, found: re.Match[str]) -> Operation:
    words = _alternatives(found["op"])
    groups = frozenset(word[1:] for word in words if word.startswith("@"))
    names = [word for word in words if not word.startswith("@")]
    return Operation(_path_regex(path), found["op"], _word_regex(names), groups, _number(found))


def _number(found: re.Match[str] | None) -> int | None:
    return int(found["number"]) if found and found["number"] else None


# What a pattern asks of a candidate: plain functions, so that a pattern can be pickled


def _has_path(regex: re.Pattern[str], candidate: Candidate) -> bool:
    return _fits(regex, candidate.path)


def _has_regex(regex: re.Pattern[str], candidate: Candidate) -> bool:
    return regex.fullmatch(candidate.path) is not None


def _has_type(regex: re.Pattern[str], candidate: Candidate) -> bool:
    return any(map(regex.fullmatch, candidate.types))


def _never(candidate: Candidate) -> bool:
    return False


def _asks(function: Callable[[Candidate], bool], name: str, candidate: Candidate) -> bool:
    try:
        return bool(function(candidate))
    except Exception as error:
        raise PatternError(
            f"the pattern {name} must be a function (site) -> bool, but for {candidate.path!r} it raised {error!r}"
        ) from error


# Globs as regular expressions


def _path_regex(text: str) -> re.Pattern[str]:
    """For paths with a dot after every segment (see `_fits`), so that the root is no segment and each is one unit.

    The text itself comes first: a path that contains glob characters is still found by its own name.
    """
    itself = re.escape(f"{text}.") if text else ""
    return re.compile("|".join(dict.fromkeys([itself, *map(_segments, _alternatives(text))])), re.DOTALL)


def _fits(regex: re.Pattern[str], path: str) -> bool:
    return regex.fullmatch(f"{path}." if path else "") is not None


def _word_regex(words: Iterable[str]) -> re.Pattern[str]:
    """For names without segments; no words match nothing."""
    globs = [_segment(word, ".") for text in words for word in _alternatives(text)]
    return re.compile("|".join(globs) or "(?!)", re.DOTALL)


def _slot_regex(text: str) -> re.Pattern[str] | None:
    slots = "|".join(_segment(slot, r"[^.\[\]]") for slot in _alternatives(text))
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
    """The chunks with any number of units between them.

    A chunk has a fixed number of units, so its first fit is as good as any: all but the last are taken for good
    (atomic groups), and the time to match stays far from exponential.
    """
    first, *rest = chunks
    middle = "".join(f"(?>{unit}*?{chunk})" for chunk in rest[:-1])
    return first + middle + (f"{unit}*{rest[-1]}" if rest else "")


def _alternatives(text: str) -> list[str]:
    """`a.{b,c}` as `a.b` and `a.c`, nested braces too; a brace without its partner is an ordinary character."""
    done: dict[str, None] = {}
    todo = [text]
    while todo:
        word = todo.pop()
        if braces := _BRACES.search(word):
            todo += [word[: braces.start()] + part + word[braces.end() :] for part in braces[1].split(",")]
        else:
            done[word] = None
        if len(done) + len(todo) > _MOST_ALTERNATIVES:
            raise PatternError(f"{text!r} has more than {_MOST_ALTERNATIVES} alternatives: use * or re: instead")
    return list(done)


# Saying why nothing matched


def _explain(pattern: Pattern, candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return f"{pattern.text!r} matches nothing: the model offers no sites"
    found = next((candidate for candidate in candidates if candidate.ports and pattern.finds(candidate)), None)
    if found:
        return _wrong_port(pattern, found, candidates)
    if pattern.kind == "path" and ":" in pattern.head:
        return _no_port(pattern.text)
    return f"{pattern.text!r} matches none of {len(candidates)} sites." + _instead(pattern, candidates)


def _wrong_port(pattern: Pattern, found: Candidate, candidates: Sequence[Candidate]) -> str:
    what = "" if found.path == pattern.head else f"{pattern.text!r} matches nothing: "
    wanted = " or ".join(port for port in PORTS if port in pattern.ports)
    below = [repr(text) for text in _fitting(pattern, [f"{pattern.head}.*"], candidates)]
    write = " or ".join([f"'{pattern.head}:{found.ports[0]}'", *below])
    return f"{what}{found.path!r} has no {wanted}; it has {', '.join(found.ports)}: write {write}"


def _no_port(text: str) -> str:
    found = _PORT.fullmatch(text)
    path, word = (found["path"], found["port"]) if found else text.rsplit(":", 1)
    kind, _, rest = text.partition(":")
    meant = [f"{path}:{port}" for port in nearest(word, PORTS, 1)]
    meant += [f"{known}:{rest}" for known in nearest(kind, _KINDS, 1) if known != kind]
    return f"{text!r}: there is no port {word!r}, only {', '.join(PORTS)}.{suggest(text, meant)}"


def _instead(pattern: Pattern, candidates: Sequence[Candidate]) -> str:
    """A sentence with patterns that would have matched, or else with some of what there is."""
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
    """Those heads, with the pattern's port, that do choose something."""
    texts = dict.fromkeys(head + pattern.text.removeprefix(pattern.head) for head in heads)
    return [text for text in texts if any(_matches(_parse(text), candidates))]


def _respelt(head: str, paths: Iterable[str]) -> str:
    """Each segment that occurs nowhere, replaced by the nearest that does."""
    words = dict.fromkeys(word for path in paths for word in path.split("."))
    known = [
        word if word in words or re.search(r"[*?{]", word) else [*nearest(word, words, 1), word][0]
        for word in head.split(".")
    ]
    return ".".join(known)
