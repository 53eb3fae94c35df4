"""Short forms of sites' names: patterns that mean the same site, so that they can be given to another command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.cells import cell_len

from tensortap.select.globs import fits, path_regex
from tensortap.select.names import split_port
from tensortap.text import printable
from tensortap.view.terminal.columns import shorten

_GLOB = frozenset("*?{}")
_TIMES = " ×"  # between a name and its number of calls


class SiteNames:
    """The names of a run's sites, and how each is written in little room.

    >>> names = SiteNames(["net.enc.0.mlp.fc:output", "net.dec.0.mlp.fc:output", "net.dec.1.mlp.fc:output"])
    >>> names.fit("net.dec.1.mlp.fc:output", 20), names.fit("net.dec.0.mlp.fc:output ×2", 25)
    ('**.1.mlp.fc:output', '**.dec.0.mlp.fc:output ×2')

    Where no pattern is short enough the middle is left out. `notes` says what was done.
    """

    def __init__(self, names: Iterable[str]) -> None:
        known = list(dict.fromkeys(names))
        self._ends = Counter(end for name in known for end in _ends(name))
        self._alike: dict[str, list[str]] = {}  # by their last segment and port
        for name in known:
            self._alike.setdefault(list(_ends(name))[-1], []).append(name)
        self._patterns = self._cut = False

    def fit(self, cell: str, width: int) -> str:
        """Return a name, and its number of calls where it has one, in so many columns."""
        if cell_len(cell) <= width:
            return cell
        name, times, count = cell.partition(_TIMES)
        for pattern in self._meaning(name):
            if cell_len(pattern + times + count) <= width:
                self._patterns = True
                return pattern + times + count
        self._cut = True
        return shorten(cell, width)

    def least(self, cells: Iterable[str]) -> int:
        """Return the width in which every name can be written as a pattern."""
        return max(map(self._least, cells), default=0)

    def _least(self, cell: str) -> int:
        name, times, count = cell.partition(_TIMES)
        shortest = min((cell_len(pattern) for pattern in self._meaning(name)), default=cell_len(name))
        return min(shortest, cell_len(name)) + cell_len(times + count)

    def _meaning(self, name: str) -> Iterator[str]:
        """Yield the patterns that mean this site alone: without its beginning, then with initials; long ones first.

        None for a name that is not one of the run's sites.
        """
        if _GLOB.intersection(name) or printable(name) != name or not self._ends[name]:
            return
        ends = [end for end in list(_ends(name))[1:] if self._ends[end] == 1]
        yield from (f"**.{end}" for end in ends)
        path, _, _ = split_port(ends[-1] if ends else name)
        segments, rest = path.split("."), name[len(split_port(name)[0]) :]
        for i in range(len(segments) - 1):
            if len(segments[i]) > 2 and not segments[i].isdecimal():
                segments[i] = f"{segments[i][0]}*"
                if self._is_alone(shorter := f"**.{'.'.join(segments)}", name):
                    yield shorter + rest

    def _is_alone(self, path: str, name: str) -> bool:
        """Return whether a pattern of a path means no other of the names that end alike."""
        regex = path_regex(path)
        return sum(fits(regex, split_port(other)[0]) for other in self._alike[list(_ends(name))[-1]]) == 1

    @property
    def notes(self) -> list[str]:
        """What a reader must know of the names that were written so far; a line each."""
        whole = "--wide shows names whole"
        said = [f"**.name: a pattern of this site alone, for --site; {whole}"] if self._patterns else []
        return [*said, f"other names are shortened too much to be patterns; {whole}"] if self._cut else said


def _ends(name: str) -> Iterator[str]:
    """Yield a name, then what is left of it without its first segment, its first two, and so on."""
    path, _, _ = split_port(name)
    rest = name[len(path) :]
    segments = path.split(".")
    return (".".join(segments[i:]) + rest for i in range(len(segments)))
