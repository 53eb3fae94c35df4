"""Which training goes with which model."""

from __future__ import annotations

from outside.layouts.scored.trainings import ConvTraining, DecoderPipeline, DecoderTraining
from outside.layouts.training import Layout, PipelineTraining, Setup, Training

TRAININGS: dict[str, type[Training]] = {"net": Training, "decoder": DecoderTraining, "convnet": ConvTraining}
PIPELINES: dict[str, type[Training]] = {"net": PipelineTraining, "decoder": DecoderPipeline}


def training(layout: Layout, setup: Setup) -> Training:
    """The training of a model in a layout, without a fault."""
    kinds = PIPELINES if layout.stages > 1 else TRAININGS
    return kinds[setup.model](layout, setup)
