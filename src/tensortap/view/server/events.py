"""Tell open pages that a run has grown: one poller for each run, however many pages show it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import anyio
from anyio import to_thread

from tensortap.view.api.about import shown_state
from tensortap.view.api.service import OpenRun

EVERY: Final = 1.0
ALIVE: Final = 15.0  # seconds after which a silent stream says something, so that nobody in between closes it


def state_of(opened: OpenRun) -> dict[str, Any]:
    """Return the message to pages about a run: its version, state and steps."""
    snapshot = opened.snapshot()
    last = int(snapshot.steps[-1]) if len(snapshot.steps) else None
    return {
        "version": snapshot.version,
        "state": shown_state(snapshot),
        "steps": {"count": len(snapshot.steps), "last": last},
    }


class Poller:
    """Read a run's state at an interval, once for all listeners."""

    def __init__(self, look: Callable[[], dict[str, Any]], every: float = EVERY) -> None:
        self._look = look
        self._every = every
        self._known: dict[str, Any] | None = None
        self._polling = anyio.Lock()
        self._next = 0.0

    async def states(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the state now and whenever it changes; None every ALIVE seconds when it does not."""
        told: dict[str, Any] | None = None
        quiet = 0.0
        while True:
            await self._poll()
            if self._known != told:
                told, quiet = self._known, 0.0
                yield told
            else:
                quiet += self._every
                if quiet >= ALIVE:
                    quiet = 0.0
                    yield None
            await anyio.sleep(self._every)

    async def _poll(self) -> None:
        """Read the state, unless another listener did so within the interval."""
        async with self._polling:
            if anyio.current_time() >= self._next:
                self._known = await to_thread.run_sync(self._look)
                self._next = anyio.current_time() + self._every


async def stream(poller: Poller) -> AsyncIterator[str]:
    """Yield the states as server-sent events."""
    async for state in poller.states():
        yield ": still here\n\n" if state is None else f"data: {json.dumps(state)}\n\n"
