"""Rule on drift: tensors that are distributed otherwise than in a reference run."""

from __future__ import annotations

from collections.abc import Iterator

from tensortap import text
from tensortap.diagnose.history import RunHistory, SiteHistogram, SiteHistory
from tensortap.diagnose.measures import ks, psi, shares
from tensortap.diagnose.rule import NoData, rule
from tensortap.finding import Finding
from tensortap.select.ports import FORWARD_PORTS


@rule("drift", needs=FORWARD_PORTS)
def drift(
    history: RunHistory, *, stability: float = 0.25, moderate: float = 0.1, distance: float = 0.2, least: int = 500,
    last: int = 50,
) -> Iterator[Finding]:  # fmt: skip
    """A site's values are distributed otherwise than in the reference run: population stability index, KS distance.

    Both over the histograms of the last `last` steps together, of `least` elements at least. An index above `stability`
    or a distance above `distance` is a warning, an index above `moderate` is noted.
    """
    if history.reference is None:
        raise NoData("no reference run was given: run.findings(reference='runs/before')")
    before = {site.place: site for site in history.reference.sites(*FORWARD_PORTS, duplicates=True)}
    pairs = [(site, before[site.place]) for site in history.sites(*FORWARD_PORTS) if site.place in before]
    compared = 0
    for site, other in pairs:
        now, then = history.histogram(site, last), history.reference.histogram(other, last)
        if now is None or then is None or min(now.finite, then.finite) < least:
            continue
        compared += 1
        found = _compare(site, now, then, stability, moderate, distance)
        if found:
            yield found
    if not compared:
        raise NoData(f"no site with histograms of {least} elements is in both runs")


def _compare(
    site: SiteHistory, now: SiteHistogram, then: SiteHistogram, stability: float, moderate: float, distance: float
) -> Finding | None:
    index, apart = psi(shares(then), shares(now)), ks(shares(then), shares(now))
    if index <= moderate and apart <= distance:
        return None
    return site.finding(
        now.steps,
        f"Its values have drifted: stability index {text.number(index)}, KS distance {text.number(apart)}.",
        "Look at the first site that drifted, then at what feeds it: preprocessing, precision, another checkpoint.",
        severity="warning" if index > stability or apart > distance else "info", psi=index, ks=apart,
    )  # fmt: skip
