"""Read the facts about a run from one snapshot: counts, cost, lines of code, last step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tensortap.store.catalog import PLAIN_EVENTS, PLAIN_METRICS
from tensortap.store.names import DAMAGED_RUN_JSON
from tensortap.store.queries import metrics
from tensortap.store.rank_state import recorded
from tensortap.store.segments import UNREADABLE, check_segment
from tensortap.store.snapshot import Snapshot
from tensortap.store.tensor_index import DamagedTensorError, kept_tensors

_DONE: Final = ("nonfinite_steps", "modules_run_again")  # counts of what `on_nonfinite=` saw and did
_DAMAGED: Final = {".parquet": "damaged_segments", ".arrows": "damaged_tails", ".damaged": "damaged_tails",
                   ".safetensors": "damaged_tensors"}  # fmt: skip


def info(snapshot: Snapshot) -> dict[str, Any]:
    """Return the content of `run.json`, and as `unseen` what no rank that looked for it has seen."""
    said = [state["unseen"] for state in snapshot.rank_states if "unseen" in state]
    if not said:
        return snapshot.run_json
    seen = set(map(str, snapshot.places)) if len(snapshot.ranks) > 1 else set()
    merged = {name: why for names in said for name, why in names.items() if name not in seen}
    return {**snapshot.run_json, "unseen": merged}


def module_types(described: Any) -> dict[str, str]:
    """Return the class of each module by its path, in order of definition, where `run.json` names them."""
    return {path: str(module.get("type", "")) for path, module in _modules(described)}


def module_activations(described: Any) -> dict[str, str]:
    """Return the activation that modules apply to their own output, by path, where `run.json` names it."""
    return {path: str(module["activation"]) for path, module in _modules(described) if "activation" in module}


def _modules(described: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    model = described.get("model")
    modules = model.get("modules", ()) if isinstance(model, dict) else ()
    for module in modules if isinstance(modules, list) else ():
        if isinstance(module, dict) and isinstance(path := module.get("path"), str):
            yield path, module


def ended_by(snapshot: Snapshot) -> str:
    """Return the name of the error or interrupt that ended the code that was recorded; empty when none did."""
    return next((str(state["ended_by"]) for state in snapshot.rank_states if state.get("ended_by")), "")


def numbered_phases(snapshot: Snapshot) -> list[str]:
    """Return the phases whose steps have their own numbers; none where all steps are numbered in one sequence."""
    return sorted({phase for state in snapshot.rank_states for phase in state.get("phases", ())})


def main_phase(snapshot: Snapshot) -> str | None:
    """Return the phase that views and rules read: training, where evaluation has numbers of its own; else None, all."""
    return "train" if {"train", "eval"} <= set(numbered_phases(snapshot)) else None


def lines(snapshot: Snapshot) -> dict[str, str]:
    """Return the line of the watched code for sites of operations, as `file:line  code`."""
    return {site: line for state in snapshot.rank_states for site, line in state.get("lines", {}).items()}


def last_step(snapshot: Snapshot) -> int:
    """Return the last step that left anything, be it only a metric or a tensor; −1 when none did."""
    said = [int(state.get("last_step", -1)) for state in snapshot.rank_states]
    kept = [tensor.key.step for tensor in kept_tensors(snapshot)]
    found: list[int] = [-1, *said, *kept, *snapshot.steps.tolist()[-1:], *metrics(snapshot)["step"].to_pylist()]
    return max(found)


def split_counts(counts: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the counts of what is missing or failed, and those that only say what was done, such as the search for a
    NaN's origin.

    >>> split_counts({"dropped_steps": 2, "modules_run_again": 1})
    ({'dropped_steps': 2}, {'modules_run_again': 1})
    """
    lost = {name: count for name, count in counts.items() if name not in _DONE}
    return lost, {name: count for name, count in counts.items() if name in _DONE}


def counts(snapshot: Snapshot) -> dict[str, int]:
    """Return the counts of what was dropped, thinned, skipped or not seen, over all ranks, and of damaged files."""
    total: dict[str, int] = {}
    for state in snapshot.rank_states:
        for name, n in state.get("counts", {}).items():
            total[name] = total.get(name, 0) + n
    for name in damage(snapshot):
        kind = next((kind for suffix, kind in _DAMAGED.items() if name.endswith(suffix)), "damaged_files")
        kind = "damaged_files" if name == DAMAGED_RUN_JSON else kind
        total[kind] = total.get(kind, 0) + 1
    return total | {f"missing_{kind}": rows for kind, rows in missing_rows(snapshot).items() if rows}


def damage(snapshot: Snapshot) -> dict[str, str]:
    """Return what cannot be read, or not all of it, by the name of the file, and why; as far as it was read."""
    # These list and read every tail, and every footer.
    _ = (snapshot.outlines, snapshot.rank_states, [snapshot.tensor_rows(p) for f in snapshot.tensors for p in f.tails])
    _ = snapshot.tail_rows(snapshot.metrics, PLAIN_METRICS), snapshot.tail_rows(snapshot.events, PLAIN_EVENTS)
    return dict(sorted(snapshot.catalog.damage.items()))


def read_to_the_end(snapshot: Snapshot) -> None:
    """Read every file of a run and verify its checksums, so that `counts` and `damage` tell all there is to tell."""
    for files in (*snapshot.records, *snapshot.metrics, *snapshot.events):
        for name in files.segments:
            try:
                check_segment(snapshot.files, name)
            except FileNotFoundError:
                raise
            except UNREADABLE as error:
                snapshot.catalog.mark_damaged(name, error)
    for kept in kept_tensors(snapshot):
        with contextlib.suppress(DamagedTensorError):  # it is counted
            kept.read()


def missing_rows(snapshot: Snapshot) -> dict[str, int]:
    """Return how many rows of each kind ranks have written that no file holds any more; none of a live run."""
    if snapshot.state == "live":
        return {}
    kinds = {"records": snapshot.records, "metrics": snapshot.metrics, "events": snapshot.events}
    missing = dict.fromkeys(kinds, 0)
    for kind, found in kinds.items():
        for files, state in zip(found, snapshot.rank_states, strict=True):
            rows = sum(outline.rows for outline in files.segments.values())
            lost = state.get("sealed", {}).get(kind, 0) - rows
            if kind == "records":
                rows += sum(len(snapshot.tails[path]) for path in files.tails if path in snapshot.tails)
                lost = max(lost, recorded(state) - rows)
            missing[kind] += max(lost, 0)
    return missing


def cost(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return what observing cost, of several ranks the highest; None when no tap has closed the run."""
    said = [state["cost"] for state in snapshot.rank_states if state.get("cost")]
    return max(said, key=lambda cost: float(cost["share"])) if said else None
