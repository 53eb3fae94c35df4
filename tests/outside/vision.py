"""One model of every family of torchvision and timm, with random weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from outside.checks import Subject
from outside.packages import NotBuildableError, load_torchvision

MOST_PARAMETERS = 30_000_000
# One of each family; detection needs torchvision's compiled operators, which the CPU build of PyTorch cannot load.
TORCHVISION = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "googlenet", "inception_v3", "maxvit_t", "mnasnet0_5",
    "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "resnet18", "resnext50_32x4d", "shufflenet_v2_x0_5",
    "squeezenet1_0", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_16", "wide_resnet50_2", "fcn_resnet50",
    "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b",
)  # fmt: skip
VIDEO = ("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v1_b")


def subjects() -> Iterator[Subject]:
    """Every family; none where the packages are not installed."""
    if load_torchvision() is None:
        return
    import timm

    yield from (Subject(f"torchvision/{name}", _torchvision(name)) for name in TORCHVISION)
    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if "untrained" not in name]
        if names:
            yield Subject(f"timm/{module}", _timm(_smallest(names)))


def _smallest(names: list[str]) -> str:
    order = (
        "test_",
        "atto",
        "femto",
        "pico",
        "nano",
        "xxs",
        "xx_small",
        "xs",
        "tiny",
        "_t",
        "small",
        "_s",
        "mini",
        "base",
        "b0",
    )
    return min(names, key=lambda name: (next((i for i, word in enumerate(order) if word in name), 99), len(name), name))


def _torchvision(name: str) -> Any:
    def make() -> tuple[nn.Module, Any]:
        from torchvision.models import get_model

        options: dict[str, Any] = {"weights": None}
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        if "resnet50" in name or "deeplab" in name or "lraspp" in name:
            options |= (
                {"weights_backbone": None} if name.split("_", maxsplit=1)[0] in ("fcn", "deeplabv3", "lraspp") else {}
            )
        model = _built(lambda: get_model(name, **options), 90_000_000)
        torch.manual_seed(1)
        if name in VIDEO:
            side = 224 if name in ("mvit_v1_b", "s3d") else 64
            return model, torch.randn(1, 3, 16, side, side)
        side = {"inception_v3": 299, "vit_b_16": 224, "maxvit_t": 224}.get(name, 64)
        return model, torch.randn(2, 3, side, side)

    return make


def _timm(name: str) -> Any:
    def make() -> tuple[nn.Module, Any]:
        import timm

        model = _built(lambda: timm.create_model(name, pretrained=False, num_classes=10), MOST_PARAMETERS)
        _, *size = 0, *model.pretrained_cfg["input_size"]
        torch.manual_seed(1)
        for side in (64, 96, 128, size[-1]):
            batch = torch.randn(2, size[0], side, side)
            try:
                with torch.no_grad():
                    model.eval()(batch)
            except Exception as error:
                last = error
            else:
                return model, batch
        raise NotBuildableError(f"{type(last).__name__}: {last}")

    return make


def _built(build: Any, most: int) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            model: nn.Module = build()
    except Exception as error:
        raise NotBuildableError(f"{type(error).__name__}: {error}") from error
    if sum(p.numel() for p in model.parameters()) > most:
        raise NotBuildableError(f"more than {most // 1_000_000} million parameters")
    return model
