"""What observing cost, what was thinned to keep it low, and what was not seen."""

from __future__ import annotations

from typing import Any

from tensortap.store.run import Run


def cost(run: Run) -> dict[str, Any]:
    """Seconds and shares, in all and by site, the dearest first; null as long as the run has not been told."""
    said, counts = run.cost, run.counts
    by_site = sorted((said or {}).get("by_site", {}).items(), key=lambda item: -item[1])
    whole = sum(seconds for _, seconds in by_site) or 1.0
    return {
        "seconds": None if said is None else said["seconds"],
        "share": None if said is None else said["share"],
        "steps": None if said is None else said["steps"],
        "sites": [{"site": site, "seconds": seconds, "share": seconds / whole} for site, seconds in by_site],
        "thinned": {name: count for name, count in counts.items() if name.startswith("thinned")},
        "counts": counts,
        "unseen": run.info.get("unseen", {}),
    }
