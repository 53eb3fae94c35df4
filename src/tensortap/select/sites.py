"""Choose sites by patterns.

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

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from tensortap.errors import PatternError
from tensortap.select.explain import explain
from tensortap.select.names import SiteName, split
from tensortap.select.patterns import Candidate, Pattern, PatternLike
from tensortap.select.ports import OP_PORTS, PORTS

__all__ = ["OP_PORTS", "PORTS", "Candidate", "Match", "Pattern", "PatternLike", "SiteName", "select", "split"]


class Match(NamedTuple):
    """One site that a pattern chose."""

    candidate: Candidate
    port: str
    pattern: Pattern


class IndexedCandidates(list[Candidate]):
    """Candidates in their order, and where each path stands: a thousand patterns for one module each are common."""

    @cached_property
    def _positions(self) -> dict[str, list[int]]:
        positions: dict[str, list[int]] = {}
        for i, candidate in enumerate(self):
            positions.setdefault(candidate.path, []).append(i)
        return positions

    def possible(self, pattern: Pattern) -> Iterable[Candidate]:
        """Return those that a pattern may find: all, unless it has no wildcard."""
        if pattern.paths is None:
            return self
        return [self[i] for i in sorted(i for path in pattern.paths for i in self._positions.get(path, ()))]


def select(
    patterns: Sequence[PatternLike], candidates: Sequence[Candidate], *, late: bool = False
) -> list[list[Match]]:
    """Return the sites each pattern chooses, in the candidates' order. One that chooses none raises, except operations.

    With `late` the candidates are not all there yet, and none raises.

    >>> sites = [Candidate("fc1", ("Linear",), ("output",)), Candidate("fc2", ("Linear",), ("output",))]
    >>> [[match.candidate.path for match in chosen] for chosen in select(["fc?", "fc2"], sites)]
    [['fc1', 'fc2'], ['fc2']]
    """
    indexed = candidates if isinstance(candidates, IndexedCandidates) else IndexedCandidates(candidates)
    chosen = []
    for pattern in map(Pattern.parse, patterns):
        matches = list(_matches(pattern, indexed.possible(pattern)))
        if not (matches or late or pattern.is_op):
            raise PatternError(explain(pattern, indexed))
        chosen.append(matches)
    return chosen


def _matches(pattern: Pattern, candidates: Iterable[Candidate]) -> Iterator[Match]:
    wanted: dict[tuple[str, ...], list[str]] = {}  # by the ports that there are: few kinds, thousands of candidates
    for candidate in candidates:
        ports = wanted.get(candidate.ports)
        if ports is None:
            ports = wanted[candidate.ports] = [port for port in candidate.ports if port in pattern.ports]
        if ports and pattern.finds(candidate):
            for port in ports:
                yield Match(candidate, port, pattern)
