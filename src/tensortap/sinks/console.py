"""Print records as lines on the terminal."""

from __future__ import annotations

from typing import IO

from tensortap.record.step import Record
from tensortap.reduce.summary import Summary
from tensortap.sinks.base import RecordSink
from tensortap.sinks.line import dead, line, nonfinite


class Console(RecordSink):
    """Print one line a record; on a terminal the worst are coloured.

    >>> sink = Console()
    """

    def __init__(self, stream: IO[str] | None = None) -> None:
        import rich.console  # takes longer to load than all other sinks

        self._console = rich.console.Console(file=stream, highlight=False, markup=False, soft_wrap=True)

    def record(self, record: Record) -> None:
        """Print one record."""
        self._console.print(line(record), style=style(record.summary))


def style(summary: Summary) -> str:
    """Return red for what is not finite, yellow for what is dead."""
    if nonfinite(summary):
        return "bold red"
    return "yellow" if dead(summary) else ""
