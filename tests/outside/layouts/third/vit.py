"""A vision transformer of PyTorch's own layers under FSDP2: several wrappings, mixed precision, offload, HSDP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outside.layouts.third.scene import ROWS, Loop, Scene, begin, generator, mesh, share

WIDTH, PATCH, SIZE, CLASSES = 16, 4, 12, 7


class ViT(nn.Module):
    """Patches, a class token, positions, an encoder of nn.TransformerEncoderLayer, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.1)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + (SIZE // PATCH) ** 2, WIDTH) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


def train(scene: Scene) -> Loop:
    """Set up the training."""
    model: Any = begin(scene, ViT)
    settings: dict[str, Any] = {}
    if scene.has("mixed"):
        reduced = torch.bfloat16 if scene.fault == "reduced in bf16" else torch.float32
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
    if scene.fault == "reduced in bf16" and not scene.has("mixed"):
        settings["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    if scene.has("offload"):
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if scene.layout == "hsdp":
        settings["mesh"] = mesh(("replicate", 2), ("shard", scene.world // 2))
    if scene.layout.startswith(("fsdp", "hsdp")):
        if scene.layout == "fsdp-fine":
            for layer in model.layers:
                fully_shard([layer.norm1, layer.norm2], **settings)
            fully_shard(model.patch_embed, **settings)
            fully_shard([model.norm, model.head], **settings)
        for layer in model.layers if scene.layout != "fsdp-root" else ():
            fully_shard(layer, **settings)
        dropped = {model.pos_embed, model.cls_token} if scene.fault == "dropped" else None
        fully_shard(model, **settings, **({"ignored_params": dropped} if dropped else {}))
    elif scene.layout == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    kind = torch.optim.AdamW if scene.has("adamw") else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.003 if scene.has("adamw") else 0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    stale: dict[str, Tensor] = {}

    def step(number: int) -> None:
        optimizer.zero_grad()
        images = torch.randn(ROWS, 3, SIZE, SIZE, generator=generator(50 + number)).to(scene.dtype)
        classes = torch.randint(0, CLASSES, (ROWS,), generator=generator(90 + number))
        rank = scene.rank
        if scene.fault == "rows of neighbour" and number == 1 and rank == 3:
            rank = 2
        x, y = share(images, rank, scene.world), share(classes, rank, scene.world)
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        if scene.fault == "divide factor":
            for name, p in model.layers[1].named_parameters():
                if not name.startswith("norm"):
                    p.grad /= 2
        if scene.has("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if scene.fault == "stale offload" and number == 1 and scene.rank == 1:
            stale["copy"] = model.head.weight.to_local().detach().clone()
        optimizer.step()
        if scene.fault == "rate not scheduled" and scene.rank == 1:
            return
        schedule.step()
        if "copy" in stale:
            model.head.weight.to_local().detach().copy_(stale.pop("copy"))

    return Loop(model, step)
