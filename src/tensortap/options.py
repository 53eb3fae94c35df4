"""The options of `watch` that are rarely needed: durability, queueing, numbering."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, Final, get_args

from tensortap.adapters.protocol import FastPath
from tensortap.errors import ProbeError, nearest
from tensortap.record.recorder import LOOKBACK_BYTES
from tensortap.record.writer import QUEUE_BYTES
from tensortap.types import WhenFull

_EVERYDAY: Final = (
    "to", "lookback", "budget", "on_nonfinite", "strict", "resume", "overwrite", "ranks", "global_stats", "options",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `tt.watch(model, options=tt.Options(...))` takes besides its everyday arguments.

    >>> import tensortap as tt
    >>> tt.Options(queue_bytes=1 << 20, when_full="drop").when_full
    'drop'

    `queue_bytes` is how much may wait to be written, `when_full` whether a step then waits ("block") or is dropped and
    counted ("drop"). `lookback_bytes` bounds the steps held for look-back. `start` is the first step's number; with
    `resume` it is at least the one after the run's last. `rank` overrides what the framework or the launcher says.
    `fast_path="leave"` opens layers that would run fused, whose results then differ by rounding. `context=True`
    records the training context too, as `tensortap run` does: events of losses, optimizers and batches, which most
    rules need; of models of PyTorch and Keras. With `explicit_steps=True` only `tap.step()` ends a step, from the first
    one on, also where the model is called several times in it. `control=False` listens to no `tensortap ctl`: otherwise
    the run folder has a socket that its owner can ask for more while the run goes on.
    """

    queue_bytes: int = QUEUE_BYTES
    when_full: WhenFull = "block"
    lookback_bytes: int = LOOKBACK_BYTES
    start: int = 0
    rank: int | None = None
    fast_path: FastPath = "keep"
    context: bool = False
    explicit_steps: bool = False
    control: bool = True

    def __post_init__(self) -> None:
        if self.when_full not in ("block", "drop"):
            raise ProbeError(f"when_full must be 'block' or 'drop', got {self.when_full!r}")
        if self.fast_path not in get_args(FastPath):
            raise ProbeError(f"fast_path must be {' or '.join(map(repr, get_args(FastPath)))}, got {self.fast_path!r}")
        for name in ("queue_bytes", "lookback_bytes", "start", "rank"):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not (whole or (name == "rank" and value is None)) or (whole and value < 0):
                raise ProbeError(f"{name} must be a whole number of at least 0, got {value!r}")

    def with_keywords(self, keywords: Mapping[str, Any]) -> Options:
        """Return these options changed by keywords of `watch` itself; raise for one that there is not."""
        names = [field.name for field in fields(self)]
        for name in keywords:
            if name not in names:
                near = nearest(name, [*names, *_EVERYDAY], 1)
                hint = f". Did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"watch() got an unexpected keyword argument {name!r}{hint}")
        return replace(self, **keywords)
