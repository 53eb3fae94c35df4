"""One training in somebody else's loop: opened once, its steps closed at the loop's word, closed whatever happens."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from tensortap.errors import UnsupportedError
from tensortap.watch import Tap, watch


class Session:
    """What callbacks share. `probes` and `options` are those of `tt.watch`.

    Evaluation between two steps is not recorded, and then steps have the loop's own numbers; with `evaluation` every
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
        """The training begins at this step of the loop's. A run that it goes on with is gone on with."""
        if self.open:
            return
        again = {"resume": True} if (self._used or step) and "overwrite" not in self._options else {}
        self._tap = watch(model, *self._probes, **{"start": step, "rank": rank, **again, **self._options})
        self._tap.explicit = True
        self._used = True
        self.leave()

    def enter(self) -> None:
        """What comes belongs to the step."""
        if self.open:
            self.tap.unmute()

    def leave(self) -> None:
        """What comes belongs to no step, unless evaluation is to be recorded."""
        if self.open and not self._evaluation:
            self.tap.mute()

    def step(self, number: int, **metrics: Any) -> None:
        """The step is over, of which the loop says that it was this one. It is noted where our number is another."""
        if not self.open:
            return
        self.tap.unmute()
        current = self.tap.recorder.current
        current.phase = "train"
        own = {} if current.number == number else {"global_step": number}
        self.tap.step(**metrics, **own)
        self.leave()

    def evaluated(self) -> None:
        """A batch of an evaluation is over."""
        if self.open and self._evaluation:
            self.tap.recorder.current.phase = "eval"
            self.tap.step()

    def close(self) -> None:
        """The training is over, or will not go on. A second call does nothing."""
        if self._tap is not None:
            self._tap.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def numbers_in(metrics: Any) -> dict[str, float]:
    """Those of a loop's metrics that are numbers."""
    return {str(name): value for name, value in (metrics or {}).items() if isinstance(value, (int, float))}
