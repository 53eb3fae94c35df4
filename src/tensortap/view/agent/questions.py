"""Answer questions about the runs below a folder in few words: `Questions("runs").findings(run="exp1")`.

Every answer is a small dictionary of plain values. Nothing is written.
"""

from __future__ import annotations

from typing import Any, Final

from tensortap.diff.runs import diff
from tensortap.errors import suggest
from tensortap.record.step import Record
from tensortap.store.facts import lines, main_phase
from tensortap.store.queries import place_named, records_in, table
from tensortap.store.run import Run
from tensortap.store.sandbox import sql_in_sandbox
from tensortap.store.snapshot import Snapshot
from tensortap.view.agent.brief import brief, paged, thinned
from tensortap.view.agent.story import plain_causes, story
from tensortap.view.api.run_finder import RunFinder
from tensortap.view.terminal.overview import about, recent_overview

POINTS: Final = 40  # of a series in one answer
BARS: Final = 24  # of a histogram
ROWS: Final = 200  # of a query
SECONDS: Final = 10.0


class Questions:
    """The questions about the runs below a folder.

    >>> import numpy as np, tempfile, tensortap as tt
    >>> folder = tempfile.mkdtemp()
    >>> with tt.watch(to=f"{folder}/exp1") as watching:
    ...     _ = tt.tap(np.ones(3), "x")
    ...     watching.step(loss=1.0)
    >>> Questions(folder).runs()["runs"][0]["run"]
    'exp1'
    >>> Questions(folder).series("x", "mean")["values"]
    [1.0]
    """

    def __init__(self, path: str) -> None:
        self._finder = RunFinder(path)
        self._opened: dict[str, Run] = {}

    def runs(self, page: int = 0) -> dict[str, Any]:
        """List the runs: name, state, model, steps."""
        return paged("runs", [self._listed(name) for name in self._finder.ids()], page)

    def explain(self, run: str = "", page: int = 0) -> dict[str, Any]:
        """Tell what happened in a run and what is wrong with it, as text."""
        found = paged("lines", story(self._run(run)).splitlines(), page)
        return {"text": "\n".join(found.pop("lines")), **found}

    def summary(self, run: str = "", sites: str = "", page: int = 0) -> dict[str, Any]:
        """List a run's sites in order of importance, with the statistics of their last record."""

        def read(snapshot: Snapshot) -> tuple[list[dict[str, Any]], dict[str, Any]]:
            seen = recent_overview(snapshot, [sites] if sites else None)
            rows = [_row(item) for item in seen.as_json(seen.rows)["rows"]] if seen else []
            return rows, seen.about if seen else about(snapshot)

        rows, said = self._run(run).snapshots.read(read)
        return paged("sites", rows, page, **said)

    def findings(self, run: str = "", page: int = 0) -> dict[str, Any]:
        """List what the rules found, one item for each cause, with its places and the change to make."""
        found = self._run(run).findings()
        return paged("findings", plain_causes(found), page, summary=found.summary(), no_data=sorted(found.skipped))

    def series(self, site: str, stat: str = "std", run: str = "", phase: str = "") -> dict[str, Any]:
        """Return one statistic of a site over steps, thinned to a few points."""
        steps, values = self._run(run).series(site, stat, phase=phase or None)
        chosen = thinned(range(len(steps)), POINTS)
        points = {"steps": [int(steps[i]) for i in chosen], "values": [values[i] for i in chosen]}
        return brief({"site": site, "stat": stat, **points, "of": len(steps)})  # type: ignore[no-any-return]

    def metric(self, name: str = "", run: str = "") -> dict[str, Any]:
        """Return a metric over steps, thinned; without a name the names of all."""
        table = self._run(run).metrics()
        known = sorted(set(table["name"].to_pylist()))
        if name not in known:
            hint = f"there is no metric {name!r}.{suggest(name, known)}" if name else "give one of these names"
            return {"names": known, "hint": hint}
        named = zip(*(table[column].to_pylist() for column in ("name", "step", "value")), strict=True)
        points = sorted((step, value) for of, step, value in named if of == name and value is not None)
        chosen = thinned(points, POINTS)
        steps, values = [step for step, _ in chosen], [value for _, value in chosen]
        return brief({"metric": name, "steps": steps, "values": values, "of": len(points)})  # type: ignore[no-any-return]

    def histogram(self, site: str, step: int = -1, run: str = "") -> dict[str, Any]:
        """Return a site's histogram at a step (the last by default) as bars from low to high."""
        record = self._record(run, site, step)
        said = {name: record[name] for name in ("min", "max", "zeros", "nan", "posinf", "neginf")}
        bars = [round(height) for height in record.summary.heights(BARS)]
        hint = "bars count elements in equal steps from min to max" if bars else "no histogram was kept"
        return brief({"site": site, "step": record.step, **said, "bars": bars, "hint": hint})  # type: ignore[no-any-return]

    def site(self, site: str, step: int = -1, run: str = "") -> dict[str, Any]:
        """Return all statistics of a site at a step, the last by default, and the line of code of an operation."""

        def read(snapshot: Snapshot) -> tuple[Record, str | None]:
            found = _nearest_record(snapshot, site, step)
            return found, lines(snapshot).get(found.place.site)

        record, line = self._run(run).snapshots.read(read)
        stats = {name: value for name, value in record.items() if not name.startswith("hist")}
        return brief({**stats, **({"line": line} if line else {})})  # type: ignore[no-any-return]

    def compare(self, a: str, b: str, page: int = 0) -> dict[str, Any]:
        """Compare two runs: where they first diverge, and the sites that differ."""
        found = diff(self._run(a), self._run(b))
        rows = [row.to_dict() for row in found.rows if row.differs]
        return paged("differing", rows, page, headline=found.headline, remarks=list(found.remarks()))

    def sql(self, query: str, run: str = "", page: int = 0) -> dict[str, Any]:
        """Ask DuckDB about the tables records, metrics and events of a run; nothing else is read, nothing written."""
        opened = self._run(run)
        table = opened.snapshots.read(lambda snapshot: sql_in_sandbox(snapshot, query, ROWS, SECONDS))
        return paged("rows", table.to_pylist(), page, columns=table.column_names)

    def where(self, name: str) -> str:
        """Return the path of a run."""
        return self._finder.where(name)

    def _run(self, name: str) -> Run:
        path = self.where(name)
        if path not in self._opened:
            self._opened[path] = Run(path)
        return self._opened[path]

    def _listed(self, name: str) -> dict[str, Any]:
        try:
            return {"run": name, **self._run(name).snapshots.read(_in_short)}
        except Exception as error:
            return {"run": name, "state": "unreadable", "why": str(error)}

    def _record(self, run: str, site: str, step: int) -> Any:
        return self._run(run).snapshots.read(lambda snapshot: _nearest_record(snapshot, site, step))


def _in_short(snapshot: Snapshot) -> dict[str, Any]:
    said = about(snapshot)
    return {"state": said["state"], "model": said["model"], "steps": len(snapshot.steps)}


def _nearest_record(snapshot: Snapshot, site: str, step: int) -> Record:
    """Return the record of a site at the step nearest to the one asked for; the last one where that is negative."""
    place, phase = place_named(snapshot, site, None, None), main_phase(snapshot)
    steps = table(snapshot, [str(place)], columns=["step"], phase=phase)["step"].to_pylist()
    wanted = max(steps) if step < 0 else min(steps, key=lambda known: abs(known - step))
    return next(records_in(table(snapshot, [str(place)], steps=wanted, phase=phase)))


def _row(item: dict[str, Any]) -> dict[str, Any]:
    kept = ("name", "mean", "std", "min", "max", "nan", "posinf", "neginf", "first_nonfinite_step")
    return {name: item[name] for name in kept if item.get(name) not in (None, 0)}
