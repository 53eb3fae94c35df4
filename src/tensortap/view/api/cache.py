"""Remember what was computed, within a number of bytes; several that ask for one value wait for one computation."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class SizedCache:
    """The last used values that fit into `limit` bytes.

    >>> cache = SizedCache(100)
    >>> cache.get("answer", lambda: 42, nbytes=lambda value: 8)
    42
    >>> cache.held
    8
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._coming: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()

    def has(self, key: Hashable) -> bool:
        """Return whether a value is there, without making it."""
        with self._lock:
            return key in self._kept

    def get(self, key: Hashable, make: Callable[[], T], nbytes: Callable[[T], int]) -> T:
        """Return the value of a key, made once however many ask for it. A value above the limit is not kept."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                known: T = self._kept[key][0]
                return known
            coming = self._coming.get(key)
            mine = coming is None
            if coming is None:
                coming = self._coming[key] = Future()
        made: T = self._make(key, make, nbytes, coming) if mine else coming.result()
        return made

    def _make(self, key: Hashable, make: Callable[[], T], nbytes: Callable[[T], int], coming: Future[T]) -> T:
        try:
            value = make()
        except BaseException as error:
            with self._lock:
                del self._coming[key]
            coming.set_exception(error)
            raise
        with self._lock:
            del self._coming[key]
            self._keep(key, value, nbytes(value))
        coming.set_result(value)
        return value

    def _keep(self, key: Hashable, value: Any, size: int) -> None:
        if size > self.limit:
            return
        self._kept[key] = (value, size)
        self.held += size
        while self.held > self.limit:
            self.held -= self._kept.popitem(last=False)[1][1]
