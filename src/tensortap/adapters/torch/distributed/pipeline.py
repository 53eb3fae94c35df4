"""Pipeline stages: their microbatches are calls of one step, and their sites carry the stage's name."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from torch import nn

_STAGE: Final = "torch.distributed.pipelining.stage"
_DEEPEST: Final = 40
SHAPE_INFERENCE: Final = -1  # the first step runs each stage once on tensors without data, to learn shapes


def microbatch() -> int | None:
    """Return which microbatch of a pipeline's step the calling forward is for; None outside pipelines.

    The schedule does not publish it, so it is read from the stage's own frame.
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
                return SHAPE_INFERENCE
        frame = frame.f_back
    return None


def pipelines_in_use() -> bool:
    """Return whether stages of a pipeline may be called in this process."""
    return _STAGE in sys.modules


def is_stage(value: Any) -> bool:
    """Return whether a value is a stage of a pipeline."""
    stages = sys.modules.get(_STAGE)
    return stages is not None and isinstance(value, stages._PipelineStageBase)


def tree_of(stage: Any) -> tuple[nn.Module, nn.Module]:
    """Return the module tree that gives a stage's sites their names, and the module in it that is called.

    `pipeline()` keeps the names that modules have in the whole model; a module given to `PipelineStage` by hand has
    names of its own, which another stage may have too, so the stage's number is prepended.
    """
    called: nn.Module = stage.submod
    if hasattr(stage, "pipe_info"):
        return called, called
    return nn.ModuleDict({f"stage{stage.stage_index}": called}), called
