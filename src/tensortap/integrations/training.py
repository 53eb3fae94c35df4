"""One training in a trainer's loop: opened once, steps closed when the trainer says so, closed whatever happens."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from tensortap.errors import UnsupportedError
from tensortap.watch import Tap, watch


class TrainingSession:
    """Base of the callbacks. `probes` and `options` are those of `tt.watch`.

    Evaluation between two steps is not recorded, and then steps have the trainer's own numbers; with `evaluation` every
    batch of it is a step of its own.
    """

    def __init__(self, *probes: Any, evaluation: bool = False, **options: Any) -> None:
        self._probes = probes
        self._options = options
        self._evaluation = evaluation
        self._tap: Tap | None = None
        self._used = False

    @property
    def tap(self) -> Tap:
        """The tap of the training that runs, or of the last one."""
        if self._tap is None:
            raise UnsupportedError("the training has not begun, so there is no tap yet; look at .tap after train()")
        return self._tap

    @property
    def open(self) -> bool:
        """Whether a training runs."""
        return self._tap is not None and not self._tap.closed

    def begin(self, model: Any, step: int, rank: int) -> None:
        """Begin the training at this step of the trainer. A training that goes on continues its run."""
        if self.open:
            return
        again = {"resume": True} if (self._used or step) and "overwrite" not in self._options else {}
        self._tap = watch(model, *self._probes, **{"start": step, "rank": rank, **again, **self._options})
        self._tap.steps.explicit = True
        self._used = True
        self.leave()

    def enter(self) -> None:
        """Record the following calls as part of the step."""
        if self.open:
            self.tap.unmute()

    def leave(self) -> None:
        """Record nothing of the following calls, unless evaluation is recorded too."""
        if self.open and not self._evaluation:
            self.tap.mute()

    def step(self, number: int, **metrics: Any) -> None:
        """Close the step that has this number in the trainer; the number is noted where ours is another."""
        if not self.open:
            return
        self.tap.unmute()
        current = self.tap.recorder.current
        current.phase = "train"
        own = {} if current.number == number else {"global_step": number}
        self.tap.step(**metrics, **own)
        self.leave()

    def evaluated(self) -> None:
        """Close a batch of an evaluation."""
        if self.open and self._evaluation:
            self.tap.recorder.current.phase = "eval"
            self.tap.step()

    def close(self) -> None:
        """End the training. A second call does nothing."""
        if self._tap is not None:
            self._tap.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def numbers_in(metrics: Any) -> dict[str, float]:
    """Return those metrics of a trainer that are numbers."""
    return {str(name): value for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
