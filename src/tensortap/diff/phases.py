"""Which steps of two runs are compared: a step is known by its phase and its number, as each phase may count its own.

Under `tensortap run` there is a training step 0 and an evaluation step 0. With `watch` all steps have one sequence of
numbers, in which the training step after an evaluation has another number than in a run without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tensortap.store.arrays import array_of, encoded
from tensortap.store.blocks import blocks
from tensortap.store.facts import numbered_phases
from tensortap.store.snapshot import Snapshot, phase_steps
from tensortap.text import counted, printable

_MAIN: Final = "train"
_SHOWN: Final = 3


class PhaseStep(NamedTuple):
    """A step of a run: its phase, empty where none is known, and its number."""

    phase: str
    step: int


StepPair = tuple[PhaseStep, PhaseStep]
PhaseSteps = Mapping[str, Sequence[int]]


class PairedSteps(NamedTuple):
    """The steps that are compared, in order of execution, and those that only one of the runs has."""

    both: list[StepPair]
    only_in_a: tuple[PhaseStep, ...]
    only_in_b: tuple[PhaseStep, ...]
    phases_of_a: frozenset[str]
    phases_of_b: frozenset[str]
    by_phase: bool  # several phases are compared, each with numbers of its own

    @staticmethod
    def of(a: Snapshot, b: Snapshot, wanted: Callable[[int], bool]) -> PairedSteps:
        """Pair the steps of two runs whose numbers are wanted."""
        known = [phase_steps(run) for run in (a, b)]
        own = all(numbered_phases(run) or len(of) < 2 for run, of in zip((a, b), known, strict=True))
        steps = [{phase: [s for s in found.tolist() if wanted(s)] for phase, found in of.items()} for of in known]
        pairs = paired_steps(steps[0], steps[1], numbered_by_phase=own)
        by_phase = own and len(known[0].keys() & known[1].keys()) > 1
        if by_phase:  # numbers do not tell in which order training and evaluation were
            began = [_began(run) for run in (a, b)]
            pairs = _by_training(pairs, began[0], began[1], wanted)
            pairs = sorted(pairs, key=lambda pair: (began[0].get(pair[0], 0), pair[0].step))
        alone = [_without(of, {pair[i] for pair in pairs}) for i, of in enumerate(steps)]
        return PairedSteps(pairs, alone[0], alone[1], frozenset(known[0]), frozenset(known[1]), by_phase)

    @property
    def moved(self) -> str:
        """The reason why steps of different numbers were paired, with an example; empty if there are none."""
        pair = next((pair for pair in self.both if pair[0].step != pair[1].step), None)
        if pair is None:
            return ""
        suffix = self.suffix(pair[0].phase)
        example = f"step {pair[0].step}{suffix} of a with step {pair[1].step}{suffix} of b"
        if suffix:
            return f"one evaluates more often: evaluations were paired by the training before them, such as {example}"
        return f"steps of one number are of different phases: they were paired by phase, such as {example}"

    def remarks(self) -> Iterator[str]:
        """Yield what only one run has: whole phases that the other lacks, and steps of phases that both have."""
        sides = (("a", self.only_in_a, self.phases_of_b), ("b", self.only_in_b, self.phases_of_a))
        for run, alone, known in sides:
            lacking = [at for at in alone if at.phase and known - {""} and at.phase not in known]
            for phase in dict.fromkeys(at.phase for at in lacking):
                count = sum(at.phase == phase for at in lacking)
                yield f"only in {run}: the phase {printable(phase)}, {counted(count, 'step')}"
            gone = {at.phase for at in lacking}
            if rest := [at for at in alone if at.phase not in gone]:
                yield f"only in {run}: {counted(len(rest), 'step')}: {self._listed(rest)}"

    def _listed(self, steps: Sequence[PhaseStep]) -> str:
        more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
        return ", ".join(f"{at.step}{self.suffix(at.phase)}" for at in steps[:_SHOWN]) + more

    def suffix(self, phase: str) -> str:
        """Return the text about the phase after a step's number; empty if numbers alone tell steps apart."""
        return f" ({phase})" if phase and self.by_phase else ""


def paired_steps(a: PhaseSteps, b: PhaseSteps, *, numbered_by_phase: bool) -> list[StepPair]:
    """Return which steps are compared: those of one phase and number.

    Where all phases share one sequence of numbers, as in runs that evaluate at other times, and steps of one number are
    of different phases, the first training step of one is compared with the first training step of the other, and so
    on, and likewise for each other phase. Runs that share no phase are compared by number.

    >>> [(x.step, y.step) for x, y in paired_steps({"train": [0, 2], "eval": [1]}, {"train": [0, 1], "eval": [2]},
    ...                                            numbered_by_phase=False)]
    [(0, 0), (1, 2), (2, 1)]
    >>> paired_steps({"train": [0, 1]}, {"train": [1], "eval": [0, 1]}, numbered_by_phase=True)
    [(PhaseStep(phase='train', step=1), PhaseStep(phase='train', step=1))]
    """
    if not any(phase and phase in b for phase in a):
        of_a, of_b = _by_number(a), _by_number(b)
        return [(of_a[step], of_b[step]) for step in sorted(of_a.keys() & of_b.keys())]
    shared = [phase for phase in a if phase in b]
    if numbered_by_phase or not _disagree(_by_number(a), _by_number(b)):
        pairs = [(phase, s, s) for phase in shared for s in sorted(set(a[phase]) & set(b[phase]))]
    else:
        pairs = [(phase, *at) for phase in shared if phase for at in zip(sorted(a[phase]), sorted(b[phase]))]  # noqa: B905
    return sorted(((PhaseStep(p, x), PhaseStep(p, y)) for p, x, y in pairs), key=lambda pair: pair[0].step)


def _by_number(steps: PhaseSteps) -> dict[int, PhaseStep]:
    """Return the step of each number; among several phases, that of training."""
    phases = sorted(steps, key=lambda phase: phase == _MAIN)
    return {step: PhaseStep(phase, step) for phase in phases for step in steps[phase]}


def _disagree(a: Mapping[int, PhaseStep], b: Mapping[int, PhaseStep]) -> bool:
    return any(a[step] != b[step] for step in a.keys() & b.keys())


def _by_training(
    pairs: list[StepPair], a: Mapping[PhaseStep, int], b: Mapping[PhaseStep, int], wanted: Callable[[int], bool]
) -> list[StepPair]:
    """Return the pairs, but of phases that one run has more steps of, those after as many training steps.

    Else the second evaluation of a run that evaluates every epoch would be compared with the second of one that does
    every other, whose parameters are of another moment. `a` and `b` say when each step began.
    """
    trained = [at for at in a if at.phase == _MAIN and at in b]
    counts = [Counter(at.phase for at in began) for began in (a, b)]
    for phase in sorted((counts[0].keys() & counts[1].keys()) - {_MAIN}):
        if trained and counts[0][phase] != counts[1][phase]:
            of_a, of_b = (_after_training(began, phase, trained) for began in (a, b))
            found = [(of_a[key], of_b[key]) for key in of_a.keys() & of_b.keys()]
            pairs = [pair for pair in pairs if pair[0].phase != phase]
            pairs += [(x, y) for x, y in found if wanted(x.step) and wanted(y.step)]
    return pairs


def _after_training(
    began: Mapping[PhaseStep, int], phase: str, trained: Sequence[PhaseStep]
) -> dict[tuple[int, int], PhaseStep]:
    """Return the steps of a phase by how many training steps were before them, and which after those each is."""
    training = np.sort([began[at] for at in trained])
    steps = sorted(at for at in began if at.phase == phase)
    before = np.searchsorted(training, [began[at] for at in steps]).tolist()
    seen = Counter[int]()
    found = {}
    for at, count in zip(steps, before, strict=True):
        found[count, seen[count]] = at
        seen[count] += 1
    return found


def _without(steps: PhaseSteps, taken: set[PhaseStep]) -> tuple[PhaseStep, ...]:
    found = (PhaseStep(phase, step) for phase, numbers in steps.items() for step in numbers)
    return tuple(at for at in found if at not in taken)


def _began(run: Snapshot) -> dict[PhaseStep, int]:
    """Return when the first record of each step was made."""
    began: dict[PhaseStep, int] = {}
    for block in blocks(run, ("phase", "time")):
        phase = encoded(block.columns["phase"])
        words, code = phase.dictionary.to_pylist(), array_of(phase.indices)
        key, at = np.unique(block.number("step") * len(words) + code, return_inverse=True)
        first = np.full(len(key), np.iinfo(np.int64).max)
        np.minimum.at(first, at, array_of(block.columns["time"].cast("int64")))
        for k, time in zip(key.tolist(), first.tolist(), strict=True):
            step = PhaseStep(words[k % len(words)], k // len(words))
            began[step] = min(time, began.get(step, time))
    return began
