"""Answer every request the page can make: `Api(folder).answer("/api/heat", {"stat": "std"})`.

The server and the report call the same thing. Nothing is ever written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from tensortap.diff.runs import Side
from tensortap.errors import NotARunError, suggest
from tensortap.store.run import Run
from tensortap.store.snapshot import Snapshot, Triple
from tensortap.view.api import about
from tensortap.view.api.bins import bins_for
from tensortap.view.api.cache import SizedCache
from tensortap.view.api.card import card
from tensortap.view.api.depth import depth
from tensortap.view.api.diff import both_named, difference
from tensortap.view.api.findings import BackgroundFindings
from tensortap.view.api.harvest import REQUESTS as HARVEST_REQUESTS
from tensortap.view.api.harvest import Decode, HarvestPages
from tensortap.view.api.heat import heat
from tensortap.view.api.metrics import metrics, series_of
from tensortap.view.api.notes import RunNotes
from tensortap.view.api.phases import shown
from tensortap.view.api.query import Query
from tensortap.view.api.ranks import ranks
from tensortap.view.api.rows import ReadColumns
from tensortap.view.api.run_finder import RunFinder
from tensortap.view.api.site import site
from tensortap.view.api.stats import STATS
from tensortap.view.api.tensor import Entry, KeptTensorIndex, tensor
from tensortap.view.api.tiles import LOOKED_AT, THREADS, TiledGrids
from tensortap.view.api.timeline import phase_spans, timeline
from tensortap.view.api.wire import Answer, Buffer, ColumnAnswer, buffers

_TRIES: Final = 3
_IMPORT_AFTER: Final = 5.0  # seconds: importing it at once would make the first zoom wait
MAX_AGE: Final = 0.25  # seconds for which a snapshot of the folder is good enough
AHEAD_WIDTH: Final = 1024  # columns of the heat map that is read before it is asked for
MEMORY: Final = 384 << 20  # of grids, and of answers a sixth of it


class ReadingThreads:
    """The threads of one `Api`: for files, for the rules, and for what is read before it is asked for."""

    def __init__(self) -> None:
        self.files = ThreadPoolExecutor(THREADS, "tensortap-view")
        self.rules = ThreadPoolExecutor(1, "tensortap-rules")
        self.early = ThreadPoolExecutor(1, "tensortap-ahead")
        self._timers: list[threading.Timer] = []

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function so much later: what would keep the first requests waiting."""
        timer = threading.Timer(seconds, function)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def close(self) -> None:
        """End them; what has not begun is not begun."""
        for timer in self._timers:
            timer.cancel()
        for pool in (self.early, self.rules, self.files):
            pool.shutdown(cancel_futures=True)


class OpenRun:
    """One run with what is remembered of it. Each answer is made from the one snapshot that is passed in."""

    def __init__(
        self, ident: str, path: str, cache: SizedCache, threads: ReadingThreads, statistics: int = LOOKED_AT
    ) -> None:
        self.ident = ident
        self.run = Run(path)
        self.cache = cache
        self.grids = TiledGrids(cache, threads.files, statistics)
        self.findings = BackgroundFindings(self.run, self.grids, threads.rules)
        self._early = threads.early
        self._kept = KeptTensorIndex()

    def snapshot(self) -> Snapshot:
        """Return the run as it is now; the folder is listed at most every `MAX_AGE` seconds."""
        return self.run.snapshots.take(MAX_AGE)

    def read_ahead(self, snapshot: Snapshot, stat: str) -> None:
        """Begin to read a statistic that the overview will request; errors are reported when it is requested."""
        if stat in STATS and len(snapshot.steps):
            bins = bins_for(0, len(snapshot.steps), AHEAD_WIDTH)
            self._early.submit(self.grids.grid, snapshot, STATS[stat], bins)

    def kept(self, snapshot: Snapshot) -> dict[Triple, list[Entry]]:
        """Return the tensors that were kept, by place."""
        key = ("kept", self.run.path, snapshot.version)
        size = lambda found: 200 * sum(map(len, found.values())) + 64  # noqa: E731
        return self.cache.get(key, lambda: self._kept.by_place(snapshot), size)

    def site(self, snapshot: Snapshot, query: Query, read: ReadColumns | None = None) -> ColumnAnswer:
        """Return one place in detail; with `read`, from records that were read already."""
        return site(snapshot, query, self.kept(snapshot), read)

    def facts(self, snapshot: Snapshot) -> dict[Triple, dict[str, Any]]:
        """Return the facts about each place."""
        key = ("facts", self.run.path, snapshot.version)
        found = self.cache.get(key, lambda: about.facts_by_place(snapshot), lambda facts: 300 * len(facts) + 64)
        kept = self.kept(snapshot)
        return {triple: {**fact, "tensors": len(kept.get(triple, ()))} for triple, fact in found.items()}


Request = Callable[[OpenRun, Snapshot, Query], Answer]


def _run(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    of_phase = shown(snapshot, query)
    opened.read_ahead(of_phase, query.text("ahead"))
    names = list(series_of(of_phase, opened.cache))
    return about.described(opened.ident, snapshot, names, opened.facts(snapshot), of_phase)


def _heat(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return heat(opened.grids, shown(snapshot, query), query)


def _metrics(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return metrics(shown(snapshot, query), opened.cache, query)


def _site(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return opened.site(shown(snapshot, query), query)


def _depth(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return depth(opened.grids, shown(snapshot, query), query)


def _findings(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return opened.findings.complete(snapshot) if query.text("wait") else opened.findings.now(snapshot)


def _timeline(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return {**timeline(snapshot).as_json(), "phases": phase_spans(snapshot), "version": snapshot.version}


def _ranks(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return ranks(opened.grids, shown(snapshot, query), query)


def _card(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return card(snapshot, shown(snapshot, query), opened.cache, opened.findings.now(snapshot))


def _cost(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    return about.cost(snapshot)


def _tensor(opened: OpenRun, snapshot: Snapshot, query: Query) -> Answer:
    kept = opened.kept(snapshot).get(about.triple_of(snapshot, query.text("site")), ())
    return tensor(snapshot, query, kept)


REQUESTS: Final[Mapping[str, Request]] = {
    "/api/run": _run,
    "/api/heat": _heat,
    "/api/metrics": _metrics,
    "/api/site": _site,
    "/api/depth": _depth,
    "/api/findings": _findings,
    "/api/timeline": _timeline,
    "/api/ranks": _ranks,
    "/api/card": _card,
    "/api/cost": _cost,
    "/api/tensor": _tensor,
}
PATHS: Final = ("/api/runs", *REQUESTS, "/api/diff", *HARVEST_REQUESTS)
_CHANGING: Final = frozenset(("/api/findings", "/api/card"))  # they change while the run does not
AnswerFrom = Callable[[Sequence[Snapshot]], Answer]
T = TypeVar("T")


class EncodedAnswer(NamedTuple):
    """An answer as bytes, in one piece or several, and whether they are JSON or columns."""

    kind: str
    buffers: Sequence[Buffer]

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return sum(map(len, self.buffers))

    @property
    def data(self) -> bytes:
        """The answer in one piece."""
        return b"".join(self.buffers)


def _encoded(answer: Answer) -> EncodedAnswer:
    return EncodedAnswer("columns" if isinstance(answer, ColumnAnswer) else "json", buffers(answer))


class Api:
    """Answer what the page asks about the runs below a folder.

    >>> import numpy as np, tempfile, tensortap as tt
    >>> folder = tempfile.mkdtemp()
    >>> with tt.watch(to=f"{folder}/exp1") as watching:
    ...     _ = tt.tap(np.ones(3), "x")
    ...     watching.step(loss=1.0)
    >>> api = Api(folder)
    >>> [run["id"] for run in api.answer("/api/runs", {})["runs"]]
    ['exp1']
    >>> api.answer("/api/heat", {"stat": "mean"}).columns["value"]
    array([[1.]], dtype=float32)
    >>> api.close()
    """

    def __init__(
        self, path: str, memory: int = MEMORY, decode: Decode | None = None, statistics: int = LOOKED_AT
    ) -> None:
        self.found = RunFinder(path)
        self.notes = RunNotes(self.found)
        self.grids = SizedCache(memory * 5 // 6)
        self.answers = SizedCache(memory // 6)
        self.harvests = HarvestPages(path, self.answers, decode)
        self._threads = ReadingThreads()
        self._statistics = statistics  # that are asked for again and again: a viewer's few, or all of them
        self._opened: dict[str, OpenRun] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the threads that read."""
        self._threads.close()

    def warm(self) -> None:
        """Begin, while a browser starts, what the first look needs: slow imports, and reading the only run there is."""
        self._threads.early.submit(self._warm)

    def _warm(self) -> None:
        if self.found.alone:
            opened = self.opened("")
            snapshot = opened.snapshot()
            opened.read_ahead(shown(snapshot, Query({})), next(iter(STATS)))
        self._threads.after(_IMPORT_AFTER, _import_data_sets)

    def answer(self, path: str, given: Mapping[str, str]) -> Answer:
        """Return the answer to a request."""
        if path == "/api/runs":
            return self.runs()
        if path in HARVEST_REQUESTS:
            return self.harvests.answer(path, given)
        answer, opened = self._request(path, given)
        return answer_with_retries(opened, answer)

    def encoded(self, path: str, given: Mapping[str, str]) -> EncodedAnswer:
        """Return the answer as bytes; the same question about the same version is answered once."""
        if path == "/api/runs" or path in HARVEST_REQUESTS:
            return _encoded(self.answer(path, given))
        answer, opened = self._request(path, given)

        def remembered(snapshots: Sequence[Snapshot]) -> EncodedAnswer:
            if path in _CHANGING:
                return _encoded(answer(snapshots))
            # Key and answer are of the same snapshots: a run that grows meanwhile gets another key the next time.
            key = (path, str(Query(given)), *(snapshot.version for snapshot in snapshots))
            return self.answers.get(key, lambda: _encoded(answer(snapshots)), lambda made: made.nbytes)

        return answer_with_retries(opened, remembered)

    def runs(self) -> dict[str, Any]:
        """Return the list of runs, with their tags and notes, and of harvests."""
        notes = self.notes.all()
        said = [{**self._listed(ident), **notes.get(ident, {"tags": [], "note": ""})} for ident in self.found.ids()]
        return {"folder": self.found.path, "runs": said, "harvests": self.harvests.listed()}

    def write_note(self, ident: str, tags: Any, note: Any) -> dict[str, Any]:
        """Keep the tags and the note of a run, beside the runs; return both as they are kept."""
        self.found.where(ident)
        self.notes.write(ident, tags, note)
        return self.notes.of(ident)

    def opened(self, ident: str) -> OpenRun:
        """Return a run by its id, opened once."""
        path = self.found.where(ident)
        with self._lock:
            known = self._opened.get(path)
            if known is None:
                own = ident or self.found.ids()[0]
                known = self._opened[path] = OpenRun(own, path, self.grids, self._threads, self._statistics)
            return known

    def _request(self, path: str, given: Mapping[str, str]) -> tuple[AnswerFrom, list[OpenRun]]:
        """Return how to answer from snapshots, and the runs to take them of."""
        query = Query(given)
        if path == "/api/diff":
            a, b = (self.opened(ident) for ident in both_named(query))
            return lambda snapshots: difference(Side(a.run, snapshots[0]), Side(b.run, snapshots[1]), query), [a, b]
        if path not in REQUESTS:
            raise NotARunError(f"there is no {path!r}.{suggest(path, PATHS)}")
        opened = self.opened(given.get("run", ""))
        return lambda snapshots: REQUESTS[path](opened, snapshots[0], query), [opened]

    def _listed(self, ident: str) -> dict[str, Any]:
        try:
            return about.listed(ident, self.opened(ident).snapshot())
        except Exception as error:
            return about.unreadable(ident, error)


def _import_data_sets() -> None:
    """Import what pages of sites need: Arrow's data sets import pandas, if that is installed: a quarter of a second."""
    import pyarrow.dataset  # noqa: F401


def answer_with_retries(opened: Sequence[OpenRun], answer: Callable[[Sequence[Snapshot]], T]) -> T:
    """Answer from a snapshot of each run, and again when files were sealed or compacted away meanwhile."""
    for attempt in range(_TRIES + 1):
        try:
            return answer([run.snapshot() for run in opened])
        except NotARunError:
            raise
        except FileNotFoundError:
            if attempt == _TRIES:
                raise
            for run in opened:
                run.run.snapshots.forget()
    raise AssertionError("unreachable")
