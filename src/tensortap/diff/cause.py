"""Name the first module that is wrong, not the first that inherits it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from tensortap import text
from tensortap.diff.pair import Pair
from tensortap.select.ports import STAGES, module_of, stage_of
from tensortap.text import printable

Kind = Literal["parameter", "input", "forward", "loss", "backward", "gradient", "update", "buffer"]
Earlier = Literal["nothing", "steps", "updates"]
_PORT: Final = re.compile(r"[a-z_]+")
_SAME_FACTOR: Final = 0.02
_PARAMETER: Final[dict[Earlier, str]] = {
    "nothing": "it begins with another value",
    "steps": "its value before the step is another",
    "updates": "its value before the step is another; every update until then agrees",
}
_WORDS: Final[dict[Kind, str]] = {
    "input": "the runs do not read the same batch there",
    "forward": "what goes into it agrees, what comes out does not",
    "loss": "all forward values agree; the gradient that the loss sends back does not",
    "backward": "the gradients that come to it agree, those that leave it do not",
    "gradient": "gradients of modules agree; this parameter's, after reduction, does not",
    "update": "its gradient agrees, what the optimizer made of it does not",
    "buffer": "parameters and values agree, this buffer does not",
}


def port_of(site: str) -> str:
    """Return the port in a site's text.

    >>> port_of("fc:output"), port_of("rnn:grad_output[1]")
    ('output', 'grad_output')
    """
    found = _PORT.match(site.rpartition(":")[2])
    return found[0] if found else "output"


@dataclass(frozen=True, slots=True)
class Cause:
    """The first independent difference of two runs: what is wrong, at which step, in which module.

    `kind` says at which stage of the step: `parameter` (before it), `input`, `forward`, `loss`, `backward`, `gradient`
    (of parameters, after reduction), `update` or `buffer`. `sites` are all that are wrong at that stage and did not
    inherit it from an earlier one, `factor` the one number by which all of them are off, `rank` the rank whose copy is
    wrong while another's is right.
    """

    kind: Kind
    step: int
    site: str
    module: str
    sites: tuple[str, ...]
    rank: int | None
    factor: float | None
    everywhere: bool  # all sites of the stage are wrong
    phase: str = ""
    earlier: Earlier = "steps"  # the parts of earlier steps that were compared, and agree

    def __str__(self) -> str:
        more = f" and {len(self.sites) - 1} more" if len(self.sites) > 1 else ""
        rank = "" if self.rank is None else f" on rank {self.rank}"
        factor = "" if self.factor is None else f", {text.number(self.factor)} times the reference"
        whole = " (all of them)" if self.everywhere and more else ""
        words = _PARAMETER[self.earlier] if self.kind == "parameter" else _WORDS[self.kind]
        return f"{self.kind} at step {self.step}: {printable(self.site)}{more}{whole}{rank}{factor}: {words}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "kind": self.kind, "step": self.step, "site": self.site, "module": self.module, "sites": list(self.sites),
            "rank": self.rank, "factor": self.factor, "everywhere": self.everywhere, "phase": self.phase,
            "text": str(self),
        }  # fmt: skip


def first_cause(pairs: Sequence[Pair]) -> Cause | None:
    """Return the cause among the pairs of one step, given in order of execution; None when all agree."""
    ordered = sorted(pairs, key=lambda pair: stage_of(port_of(pair.site)))
    first = next((pair for pair in ordered if pair.differs), None)
    if first is None:
        return None
    port = port_of(first.site)
    stage = stage_of(port)
    same_stage = [pair for pair in ordered if stage_of(port_of(pair.site)) == stage]
    before = same_stage[: same_stage.index(first)]
    kind: Kind = STAGES[stage]
    if kind == "forward" and port == "input" and not _path(first):
        kind = "input"
    if kind == "backward" and not any(pair.error == 0 or not pair.differs for pair in before if _path(pair)):
        kind = "loss"
    wrong = [first] if STAGES[stage] in ("forward", "backward") else [pair for pair in same_stage if pair.differs]
    copies = [pair for pair in same_stage if (pair.site, pair.call) == (first.site, first.call)]
    return Cause(
        kind=kind,
        step=first.step,
        site=first.site,
        module=module_of(_path(first), port),
        sites=tuple(dict.fromkeys(pair.site for pair in wrong)),
        rank=first.rank if any(not pair.differs for pair in copies) else None,
        factor=_factor(wrong),
        everywhere=all(pair.differs for pair in same_stage),
        phase=first.phase,
    )


def _path(pair: Pair) -> str:
    return pair.site.rpartition(":")[0].partition("/")[0]


def _factor(wrong: Sequence[Pair]) -> float | None:
    """Return the one factor between the runs, where the same one explains every difference."""
    ratios = [pair.ratio for pair in wrong if pair.ratio is not None]
    if not ratios or len(ratios) < len(wrong) or min(ratios) <= 0:
        return None
    low, high = min(ratios), max(ratios)
    turned = any(pair.cosine is not None and pair.cosine < 1 - _SAME_FACTOR for pair in wrong)
    middle = (low * high) ** 0.5
    return middle if high / low < 1 + _SAME_FACTOR and abs(middle - 1) > _SAME_FACTOR and not turned else None
