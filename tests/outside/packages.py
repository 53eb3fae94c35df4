"""Packages of others, and what has to be done before they can be imported here."""

from __future__ import annotations

import functools
import importlib.util

import torch


class NotBuildableError(Exception):
    """This model cannot be built or called here, without taps either."""


@functools.cache
def load_torchvision() -> torch.library.Library | None:
    """Import torchvision beside a PyTorch without CUDA: its compiled part is missing, and two operators with it."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    importlib.import_module("torchvision")
    return library
