"""Pipeline stages: their microbatches are calls of one step, and their sites carry the stage's name."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from torch import nn

_STAGE: Final = "torch.distributed.pipelining.stage"
_DEEPEST: Final = 40
REHEARSAL: Final = -1  # the first step runs each stage once on made-up tensors, to learn shapes


def microbatch() -> int | None:
    """Which microbatch of a pipeline's step the calling forward is for; nothing outside pipelines.

    The schedule tells nobody, so the stage's own frame is asked.
    """
    if _STAGE not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            break
        if frame.f_globals.get("__name__") == _STAGE:
            if frame.f_code.co_name == "forward_one_chunk":
                return int(frame.f_locals["fwd_chunk_id"])
            if frame.f_code.co_name in ("_forward_metadata_inference", "_shape_inference"):
                return REHEARSAL
        frame = frame.f_back
    return None


def is_stage(value: Any) -> bool:
    """Whether a value is a stage of a pipeline."""
    stages = sys.modules.get(_STAGE)
    return stages is not None and isinstance(value, stages._PipelineStageBase)


def tree_of(stage: Any) -> tuple[nn.Module, nn.Module]:
    """The tree whose names a stage's sites have, and the module in it that is called.

    `pipeline()` keeps the names that modules have in the whole model; a module given to `PipelineStage` by hand has
    names of its own, which another stage may have too, so the stage's number is put before them.
    """
    called: nn.Module = stage.submod
    if hasattr(stage, "pipe_info"):
        return called, called
    return nn.ModuleDict({f"stage{stage.stage_index}": called}), called
