"""Choose the phase that an answer is about: evaluation never stands between the steps of training."""

from __future__ import annotations

from tensortap.store.snapshot import Snapshot
from tensortap.view.api.query import Query, RequestError

ALL = "all"


def shown(snapshot: Snapshot, query: Query) -> Snapshot:
    """Return the run restricted to the phase that a request is about."""
    return snapshot.of_phase(chosen_phase(snapshot, query))


def chosen_phase(snapshot: Snapshot, query: Query) -> str:
    """Return the phase that `phase=` names; without it training, where there are several; "" for all of them."""
    named = query.text("phase")
    if named and named not in (ALL, *snapshot.phases):
        known = ", ".join([*snapshot.phases, ALL])
        raise RequestError(f"phase must be one of {known}, got {named[:40]!r}", f"write phase={ALL}")
    if named:
        return "" if named == ALL else named
    return "train" if len(snapshot.phases) > 1 and "train" in snapshot.phases else ""
