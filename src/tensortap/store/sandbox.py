"""Answer SQL that is not trusted: only the run's files are read, nothing is written, time and rows are bounded."""

from __future__ import annotations

import threading
from typing import Any, Final

from tensortap.errors import RunError
from tensortap.store.queries import database
from tensortap.store.snapshot import Snapshot

_MEMORY: Final = "1GB"


def sql_in_sandbox(snapshot: Snapshot, query: str, rows: int, seconds: float) -> Any:
    """Return at most so many rows of a query; RunError for one that takes longer, or reaches for anything else."""
    with database(snapshot) as connection:
        import duckdb

        _lock_in(connection, snapshot)
        stop = threading.Timer(seconds, connection.interrupt)
        stop.start()
        try:
            said = connection.extract_statements(query)
            if [statement.type for statement in said] != [duckdb.StatementType.SELECT]:
                raise RunError(f"the query must be one select, got {query[:80]!r}")
            return connection.sql(query).limit(rows).to_arrow_table()
        except duckdb.InterruptException:
            raise RunError(f"the query took longer than {seconds:g} s; select fewer steps or sites") from None
        finally:
            stop.cancel()


def _lock_in(connection: Any, snapshot: Snapshot) -> None:
    """Leave the connection nothing but the segments of this run, and no way to change that."""
    files = [*snapshot.records, *snapshot.metrics, *snapshot.events]
    names = [snapshot.files.path(name) for found in files for name in found.segments]
    allowed = ", ".join("'" + name.replace("'", "''") + "'" for name in names)
    connection.execute(f"set memory_limit = '{_MEMORY}'")
    connection.execute(f"set allowed_paths = [{allowed}]")
    connection.execute("set enable_external_access = false")
    connection.execute("set lock_configuration = true")
