"""Open a run for reading: live, finished or crashed, local or remote. Nothing is ever written."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tensortap import text
from tensortap.distributed.replicas import ReplicaGroups
from tensortap.errors import RunError, UnsupportedError
from tensortap.finding import Findings
from tensortap.record.step import Record
from tensortap.store import facts, queries
from tensortap.store.catalog import Catalog
from tensortap.store.claim import read_run_json
from tensortap.store.files import Files
from tensortap.store.filters import SiteSelection, StepSelection, places_matching, step_test
from tensortap.store.merged import merged
from tensortap.store.merging import Over
from tensortap.store.names import RUN_JSON
from tensortap.store.queries import Replicated
from tensortap.store.series import Series
from tensortap.store.snapshot import Snapshot, Snapshots, State
from tensortap.store.tensor_index import (
    DamagedTensorError,
    TensorEntry,
    TensorRequest,
    kept_tensors,
    read_again,
    read_one,
)
from tensortap.store.tensors import Array, TensorKey
from tensortap.types import Place


class RunFacts:
    """What a run says of itself: its state, ranks, places, steps and counts.

    Every property takes a snapshot of its own, since a run may grow. To read several facts of one moment, take one
    snapshot, `run.snapshots.take()`, and read them from it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.files = Files(path)
        self.path = self.files.url
        catalog, (info, wrong) = Catalog(self.files), read_run_json(self.files)
        if wrong:
            catalog.mark_damaged(RUN_JSON, wrong)
        self.snapshots = Snapshots(catalog, info)

    @property
    def state(self) -> State:
        """Whether it is being written, was closed, or its process is gone without closing it."""
        return self.snapshots.take().state

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json`, and as `unseen` what no rank that looked for it has seen."""
        return self.snapshots.read(facts.info)

    @property
    def parts(self) -> dict[int, dict[str, dict[str, Any]]]:
        """By rank and place, which part of a tensor the rank holds, where that is known; see docs/ranks.md."""
        return queries.shards(self.snapshots.take())

    @property
    def ranks(self) -> list[int]:
        """The ranks that took part."""
        return self.snapshots.take().ranks

    @property
    def places(self) -> list[Place]:
        """Every place seen, in order of execution."""
        return self.snapshots.read(lambda snapshot: snapshot.places)

    @property
    def sites(self) -> list[str]:
        """Every place seen as `path:port`, in order of execution."""
        return [str(place) for place in self.places]

    @property
    def steps(self) -> list[int]:
        """The steps that have records, in order."""
        return self.snapshots.read(lambda snapshot: snapshot.steps.tolist())

    @property
    def phases(self) -> list[str]:
        """The phases whose steps have their own numbers; none where all steps are numbered in one sequence."""
        return facts.numbered_phases(self.snapshots.take())

    @property
    def lines(self) -> dict[str, str]:
        """For sites of operations, `blocks.3.attn/matmul#1`: the line of the watched code, as `file:line  code`."""
        return facts.lines(self.snapshots.take())

    @property
    def last_step(self) -> int:
        """The last step that left anything, be it only a metric or a tensor; −1 when none did."""
        return self.snapshots.read(facts.last_step)

    @property
    def counts(self) -> dict[str, int]:
        """What was dropped, thinned, skipped or not seen, over all ranks; and what cannot be read any more."""
        return self.snapshots.read(facts.counts)

    @property
    def damage(self) -> dict[str, str]:
        """What cannot be read, or not all of it, by the name of the file, and why; as far as it was read."""
        return self.snapshots.read(facts.damage)

    @property
    def cost(self) -> dict[str, Any] | None:
        """What observing cost: seconds, as a share of the step time, and by site; the highest of all ranks.

        None while the run is written, and when no tap closed it.
        """
        return facts.cost(self.snapshots.take())


class Run(RunFacts):
    """Read what was written.

    >>> import tensortap as tt                                          # doctest: +SKIP
    >>> run = tt.open_run("runs/exp1")                                  # doctest: +SKIP
    >>> run.series("blocks.3.mlp", "std")                               # doctest: +SKIP
    """

    def __repr__(self) -> str:
        return self.snapshots.read(
            lambda s: f"<Run {self.path}: {s.state}, {len(s.steps)} steps, {len(s.places)} sites>"
        )

    def _repr_html_(self) -> str:
        return str(_reader("view.notebook.run", "run_html")(self))

    def table(
        self, sites: SiteSelection = None, ports: str | Sequence[str] | None = None, steps: StepSelection = None,
        columns: Sequence[str] | None = None, phase: str | None = None,
    ) -> Any:  # fmt: skip
        """Return the records as a `pyarrow.Table`, by step, rank and order of execution.

        `sites` are patterns as in a probe, `steps` a number, a `(start, stop)` pair, a list or a slice; `phase` is
        `"train"` or `"eval"`.
        """
        return self.snapshots.read(lambda snapshot: queries.table(snapshot, sites, ports, steps, columns, phase))

    def records(
        self, sites: SiteSelection = None, ports: str | Sequence[str] | None = None, steps: StepSelection = None,
        phase: str | None = None,
    ) -> Iterator[Record]:  # fmt: skip
        """Return the records one by one."""
        return queries.records_in(self.table(sites, ports, steps, phase=phase))

    def metrics(self) -> Any:
        """Return the user's metrics as a `pyarrow.Table`; a label has a text and no value."""
        return self.snapshots.read(queries.metrics)

    def events(self) -> Any:
        """Return what happened in the training besides tensors as a `pyarrow.Table`; `data` is a JSON object."""
        return self.snapshots.read(queries.events)

    def series(
        self, site: str, stat: str, *, port: str | None = None, slot: str | None = None, call: int | None = None,
        rank: int | None = None, phase: str | None = None,
    ) -> Series:  # fmt: skip
        """Return one statistic of one site over steps; several calls or ranks of a step are merged into one value.

        Where training and evaluation have their own numbers of steps, it is training's unless `phase="eval"`.
        `stat` is a column, `nonfinite`, `absmax`, a quantile such as `q0.95`, or a number that a function of yours
        gave.
        """

        def read(snapshot: Snapshot) -> Series:
            return queries.series(snapshot, queries.place_named(snapshot, site, port, slot), stat, call, rank, phase)

        return self.snapshots.read(read)

    def merged(
        self, over: Over | Sequence[Over], sites: SiteSelection = None, steps: StepSelection = None,
        replicated: Replicated = None,
    ) -> Any:  # fmt: skip
        """Return records merged over ranks, steps or calls: counts exact, moments to rounding, histograms exact.

        Over ranks, copies of one tensor count once where `run.parts` or you, by the patterns in `replicated`, say
        that they are copies: `["embed:output"]` on all ranks, `{"tp": ["embed:output"]}` along one side of the mesh.
        """

        def read(snapshot: Snapshot) -> Any:
            copies = queries.replicas(snapshot, replicated)
            by_phase = bool(facts.numbered_phases(snapshot))
            return merged(snapshot, over, sites, steps, copies, by_phase=by_phase)

        return self.snapshots.read(read)

    def copies(self, replicated: Replicated = None) -> ReplicaGroups:
        """Return which rows are copies of another rank's, by `parts` and by the patterns given."""
        return self.snapshots.read(lambda snapshot: queries.replicas(snapshot, replicated))

    def tensor(
        self, site: str, step: int, *, port: str | None = None, slot: str | None = None, call: int = 0,
        kind: str | None = None, rank: int | None = None, probe: int | None = None, phase: str | None = None,
    ) -> Array:  # fmt: skip
        """Return what was kept of a tensor at a step: whole, a sample or rows (`kind=` when there are several).

        Where training and evaluation have a step of this number each, it is training's unless `phase="eval"`.
        """

        def read(snapshot: Snapshot) -> Array:
            place = queries.place_named(snapshot, site, port, slot)._replace(op="")
            return read_one(snapshot, TensorRequest(place, step, call, kind, rank, probe, phase))

        return self.snapshots.read(read)

    def tensors(self, sites: SiteSelection = None, steps: StepSelection = None) -> Iterator[tuple[TensorKey, Array]]:
        """Return every kept tensor, by step."""
        wanted = step_test(steps)

        def chosen(snapshot: Snapshot) -> list[TensorEntry]:
            places = None if sites is None else {p._replace(op="") for p in places_matching(sites, snapshot.places)}
            found = (kept for kept in kept_tensors(snapshot) if wanted(kept.key.step))
            return [kept for kept in found if places is None or kept.key.place in places]

        for kept in self.snapshots.read(chosen):
            with contextlib.suppress(DamagedTensorError):  # counted; the others are not lost with it
                yield kept.key, self.read_kept(kept)

    def kept(self, step: int) -> list[TensorEntry]:
        """Return what was kept of tensors at a step, each with how to read it: for choosing among them first."""
        return self.snapshots.read(lambda s: [kept for kept in kept_tensors(s, step) if kept.key.step == step])

    def read_kept(self, kept: TensorEntry) -> Array:
        """Return a listed tensor's elements, also when a live run has moved them to another file meanwhile."""
        try:
            return kept.read()
        except FileNotFoundError:
            return self.snapshots.read(lambda snapshot: read_again(snapshot, kept.key))

    def findings(self, rules: Any = None, reference: Any = None) -> Findings:
        """Return what rules conclude, the worst first: all of them, or those given as names, rules or functions.

        `reference` is a run to compare this one with.
        """
        found: Findings = _reader("diagnose", "findings")(self, rules, reference)
        return found

    def plot(self, site: str, **place: Any) -> Any:
        """Return one site over steps as a figure: of matplotlib where that is installed, else an SVG for notebooks.

        `port`, `slot`, `call` and `rank` choose as in `series`. A figure is saved with `.savefig("site.png")`.
        """
        return _reader("view.notebook.plot", "plot")(self, site, **place)

    def sql(self, query: str) -> Any:
        """Ask DuckDB about the tables `records` and `metrics`; return a `pyarrow.Table`."""
        try:
            return self.snapshots.read(lambda snapshot: queries.sql(snapshot, query))
        except FileNotFoundError as error:
            raise RunError(str(error)) from error


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open a run folder, local or remote, while it is written or afterwards."""
    _check_path(path)
    return Run(path)


def _check_path(given: Any) -> None:
    if not isinstance(given, (str, os.PathLike)):
        write = "tap.run" if hasattr(given, "run") else "tt.open_run('runs/exp1')"
        raise UnsupportedError(f"a run must be the path of its folder, got {text.a_kind(given)}: write {write}")


def _reader(package: str, name: str) -> Callable[..., Any]:
    """Return a function that reads runs and is imported when a run is asked for it: runs know no rules or pictures."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"tensortap.{package}"), name)
    return function
