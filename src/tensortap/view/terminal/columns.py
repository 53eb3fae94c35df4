"""Tables that fit the terminal: less important columns are left out first, long names are shortened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

T = TypeVar("T")
GAP: Final = 2
_NARROWEST: Final = 20


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column: its title, a row's text and style, and its priority `keep` (a higher one stays longer)."""

    title: str
    cell: Callable[[T], str]
    keep: float
    style: Callable[[T], str] = lambda row: ""
    left: bool = False


class NameFitter(Protocol):
    """Write the cells of the first column in little room."""

    def fit(self, cell: str, width: int) -> str:
        """Return a cell in so many columns."""

    def least(self, cells: Iterable[str]) -> int:
        """Return the width below which cells lose what matters."""


def grid(columns: Sequence[Column[T]], rows: Sequence[T], width: int, names: NameFitter | None = None) -> Table:
    """Return the rows as a table at most `width` wide; the first column takes the room that is left."""
    cells = [[column.cell(row) for row in rows] for column in columns]
    widths = [max(map(cell_len, [column.title, *said])) for column, said in zip(columns, cells, strict=True)]
    least = min(names.least(cells[0]), width // 2) if names else 0
    chosen, room = _fit([column.keep for column in columns], widths, width, least)
    fit = names.fit if names else shorten
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for i in chosen:
        table.add_column(Text(columns[i].title), justify="left" if columns[i].left else "right", no_wrap=True)
    for n, row in enumerate(rows):
        said = [fit(cells[i][n], room) if i == 0 else cells[i][n] for i in chosen]
        table.add_row(*(Text(text, style=columns[i].style(row)) for i, text in zip(chosen, said, strict=True)))
    return table


def _fit(keep: Sequence[float], widths: Sequence[int], width: int, least: int = 0) -> tuple[list[int], int]:
    """Return the columns that stay, and how wide the first may be."""
    chosen = list(range(len(widths)))
    least = min(widths[0], max(_NARROWEST, width // 3, least))
    while len(chosen) > 1 and least + _taken(widths, chosen) > width:
        chosen.remove(min(chosen[1:], key=lambda i: keep[i]))
    room = width - _taken(widths, chosen)
    return chosen, min(widths[0], max(room, 1))


def _taken(widths: Sequence[int], chosen: Sequence[int]) -> int:
    return sum(widths[i] + GAP for i in chosen[1:])


def shorten(name: str, width: int) -> str:
    """Shorten a site's name: segments become initials from the left, numbers stay; then the middle is left out.

    >>> shorten("model.decoder.layers.11.self_attn.q_proj:output", 36)
    'm.d.l.11.self_attn.q_proj:output'
    >>> shorten("model.decoder.layers.11.self_attn.q_proj:output", 20)
    'm.d.l.1…_proj:output'
    """
    path, colon, port = name.rpartition(":")
    segments = path.split(".")
    for i in range(len(segments) - 1):
        if cell_len(name) <= width:
            break
        segments[i] = segments[i] if segments[i].isdecimal() else segments[i][:1]
        name = ".".join(segments) + colon + port
    return _squeeze(name, width)


def _squeeze(text: str, width: int) -> str:
    """Leave out the middle: the end of a site says more than its beginning."""
    if cell_len(text) <= width:
        return text
    head = max(0, (width - 1) * 2 // 5)
    return f"{_cut(text, head)}…{_cut(text[::-1], width - 1 - head)[::-1]}"


def _cut(text: str, width: int) -> str:
    text = text[: max(width, 0)]
    while cell_len(text) > width:
        text = text[:-1]
    return text
