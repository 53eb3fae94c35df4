"""Every request the page can make, answered: `Api(folder).answer("/api/heat", {"stat": "std"})`.

The server and the report call the same thing. Nothing is ever written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from tensortap.errors import NotARunError, suggest
from tensortap.store.run import Run
from tensortap.view.api import about
from tensortap.view.api.block import Triple
from tensortap.view.api.cache import Cache
from tensortap.view.api.costs import cost
from tensortap.view.api.depth import depth
from tensortap.view.api.differing import both_named, difference
from tensortap.view.api.facts import facts_of
from tensortap.view.api.findings import Checked
from tensortap.view.api.heat import heat, site_name
from tensortap.view.api.history import THREADS, History
from tensortap.view.api.kept import Entry, Index
from tensortap.view.api.metrics import metrics, series_of
from tensortap.view.api.query import Query
from tensortap.view.api.rows import Read
from tensortap.view.api.seen import Seen, Watched
from tensortap.view.api.shelf import Shelf
from tensortap.view.api.site import site
from tensortap.view.api.tensor import tensor
from tensortap.view.api.wire import Answer, Columns, encoded

_TRIES: Final = 3
MEMORY: Final = 384 << 20  # of grids, and of answers a sixth of it


class Opened:
    """One run with what is remembered of it."""

    def __init__(
        self, ident: str, path: str, cache: Cache, pool: ThreadPoolExecutor, rules: ThreadPoolExecutor
    ) -> None:
        self.ident = ident
        self.run = Run(path)
        self.cache = cache
        self.watched = Watched(self.run)
        self.history = History(self.watched, cache, pool)
        self.checked = Checked(self.history, rules)
        self._index = Index(self.run)

    def kept(self, seen: Seen) -> dict[Triple, list[Entry]]:
        """The tensors that were kept, by place."""
        key = ("kept", self.run.path, seen.version)
        return self.cache.get(key, self._index.by_place, lambda found: 200 * sum(map(len, found.values())) + 64)

    def kept_by_name(self) -> dict[str, list[Entry]]:
        """The same by the page's names."""
        return {site_name(triple): entries for triple, entries in self.kept(self.watched.look()).items()}

    def site(self, asked: Query, read: Read | None = None) -> Columns:
        """One place closely; with `read`, from records that were read already."""
        return site(self.watched, asked, lambda triple: self.kept(self.watched.look()).get(triple, []), read)

    def facts(self, seen: Seen) -> dict[Triple, dict[str, Any]]:
        """What is told of each place."""
        key = ("facts", self.run.path, seen.version)
        facts = self.cache.get(key, lambda: facts_of(self.run, seen), lambda found: 300 * len(found) + 64)
        kept = self.kept(seen)
        return {triple: {**fact, "tensors": len(kept.get(triple, ()))} for triple, fact in facts.items()}


Request = Callable[[Opened, Query], Answer]


def _run(opened: Opened, asked: Query) -> Answer:
    seen = opened.watched.look()
    names = list(series_of(opened.watched, seen, opened.cache))
    return about.described(opened.ident, opened.watched, seen, names, opened.facts(seen))


def _heat(opened: Opened, asked: Query) -> Answer:
    return heat(opened.history, asked)


def _metrics(opened: Opened, asked: Query) -> Answer:
    return metrics(opened.watched, opened.cache, asked)


def _site(opened: Opened, asked: Query) -> Answer:
    return opened.site(asked)


def _depth(opened: Opened, asked: Query) -> Answer:
    return depth(opened.history, asked)


def _findings(opened: Opened, asked: Query) -> Answer:
    return opened.checked.complete() if asked.text("wait") else opened.checked.now()


def _cost(opened: Opened, asked: Query) -> Answer:
    return cost(opened.run)


def _tensor(opened: Opened, asked: Query) -> Answer:
    seen = opened.watched.look()
    return tensor(opened.run, seen, asked, opened.kept(seen).get(seen.triple(asked.text("site")), ()))


def _patiently(request: Request, opened: Opened, asked: Query) -> Answer:
    """Ask again when files were sealed or folded away between listing and reading them."""
    for _ in range(_TRIES):
        try:
            return request(opened, asked)
        except NotARunError:
            raise
        except FileNotFoundError:
            opened.watched.forget()
    return request(opened, asked)


REQUESTS: Final[Mapping[str, Request]] = {
    "/api/run": _run,
    "/api/heat": _heat,
    "/api/metrics": _metrics,
    "/api/site": _site,
    "/api/depth": _depth,
    "/api/findings": _findings,
    "/api/cost": _cost,
    "/api/tensor": _tensor,
}
PATHS: Final = ("/api/runs", *REQUESTS, "/api/diff")
_ANEW: Final = ("/api/runs", "/api/findings")  # they change while the run does not


class Sent(NamedTuple):
    """An answer as bytes, and whether they are JSON or columns."""

    kind: str
    data: bytes


def _sent(answer: Answer) -> Sent:
    return Sent("columns" if isinstance(answer, Columns) else "json", encoded(answer))


class Api:
    """Answers what the page asks about the runs below a folder.

    >>> import numpy as np, tempfile, tensortap as tt
    >>> folder = tempfile.mkdtemp()
    >>> with tt.watch(to=f"{folder}/exp1") as tap:
    ...     _ = tt.tap(np.ones(3), "x")
    ...     tap.step(loss=1.0)
    >>> api = Api(folder)
    >>> [run["id"] for run in api.answer("/api/runs", {})["runs"]]
    ['exp1']
    >>> api.answer("/api/heat", {"stat": "mean"}).columns["value"]
    array([[1.]], dtype=float32)
    >>> api.close()
    """

    def __init__(self, path: str, memory: int = MEMORY) -> None:
        self.shelf = Shelf(path)
        self.grids = Cache(memory * 5 // 6)
        self.answers = Cache(memory // 6)
        self._pool = ThreadPoolExecutor(THREADS, "tensortap-view")
        self._rules = ThreadPoolExecutor(1, "tensortap-rules")
        self._opened: dict[str, Opened] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the threads that read."""
        self._rules.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)

    def answer(self, path: str, given: Mapping[str, str]) -> Answer:
        """The answer to a request."""
        if path == "/api/runs":
            return self.runs()
        if path == "/api/diff":
            a, b = (self.opened(ident) for ident in both_named(Query(given)))
            return difference(a.watched, b.watched, Query(given))
        if path not in REQUESTS:
            raise NotARunError(f"there is no {path!r}.{suggest(path, PATHS)}")
        return _patiently(REQUESTS[path], self.opened(given.get("run", "")), Query(given))

    def sent(self, path: str, given: Mapping[str, str]) -> Sent:
        """The answer as it is sent; the same question about the same version is worked out once."""
        if path in _ANEW:
            return _sent(self.answer(path, given))
        runs = both_named(Query(given)) if path == "/api/diff" else (given.get("run", ""),)
        versions = tuple(self.opened(ident).watched.look().version for ident in runs)
        key = (path, str(Query(given)), *versions)
        return self.answers.get(key, lambda: _sent(self.answer(path, given)), lambda sent: len(sent.data))

    def runs(self) -> dict[str, Any]:
        """The list of runs."""
        return {"folder": self.shelf.path, "runs": [self._listed(ident) for ident in self.shelf.ids()]}

    def opened(self, ident: str) -> Opened:
        """A run by its id, opened once."""
        path = self.shelf.where(ident)
        with self._lock:
            known = self._opened.get(path)
            if known is None:
                own = ident or self.shelf.ids()[0]
                known = self._opened[path] = Opened(own, path, self.grids, self._pool, self._rules)
            return known

    def _listed(self, ident: str) -> dict[str, Any]:
        try:
            return about.listed(ident, self.opened(ident).watched)
        except Exception as error:
            return about.unreadable(ident, error)
