"""A decoder in pipeline stages: GPipe, 1F1B and interleaved schedules, a tied head, stages replicated or cut."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from outside.layouts.third.gpt import LENGTH, VOCAB, WIDTH, Block
from outside.layouts.third.scene import ROWS, Loop, Scene, average_gradients, begin, generator, mesh, share

LAYERS = 4


class Rotary(nn.Module):
    """Adds a wave of the position; `start` is where a stage begins to count."""

    start = 0

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(self.start, self.start + x.shape[1])[:, None] * torch.linspace(0.1, 1, WIDTH)
        return x + 0.2 * torch.cos(at).to(x.dtype)


class Step(nn.Module):
    """Position and a block."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.block = Rotary(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.rotary(x))


class Decoder(nn.Module):
    """As torchtitan cuts it: layers of other stages are deleted, ends are None."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings: Any = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleDict({str(i): Step() for i in range(LAYERS)})
        self.norm: Any = nn.LayerNorm(WIDTH)
        self.output: Any = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if self.output is not None else x


def stage_module(model: Decoder, number: int, stages: int) -> Decoder:
    """One of so many stages."""
    part = copy.deepcopy(model)
    own = {str(i) for i in range(number * LAYERS // stages, (number + 1) * LAYERS // stages)}
    for name in list(part.layers):
        if name not in own:
            del part.layers[name]
    if number:
        part.tok_embeddings = None
    if number < stages - 1:
        part.norm = part.output = None
    return part


def train(scene: Scene) -> Loop:
    """Set up the training."""
    model: Any = begin(scene, Decoder)
    if scene.has("tied"):
        model.output.weight = model.tok_embeddings.weight
    if scene.layout.startswith("sequence"):
        return _sequence(scene, model)
    return _alone(scene, model) if scene.world == 1 else _staged(scene, model)


def _batch(number: int) -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator(900 + number))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def _optimizer(scene: Scene, parameters: Any) -> Any:
    if scene.has("adamw"):
        return torch.optim.AdamW(parameters, 0.01)
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def _alone(scene: Scene, model: Any) -> Loop:
    optimizer = _optimizer(scene, model.parameters())

    def step(number: int) -> None:
        tokens = _batch(number)
        _loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)


def _plan() -> dict[str, Any]:
    whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    known: dict[str, Any] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(LAYERS):
        block = f"layers.{i}.block"
        known |= {
            f"{block}.ln_1": SequenceParallel(), f"{block}.ln_2": SequenceParallel(),
            f"{block}.attn": PrepareModuleInput(**whole), f"{block}.mlp": PrepareModuleInput(**whole),
            f"{block}.attn.c_attn": ColwiseParallel(output_layouts=Replicate()),
            f"{block}.attn.c_proj": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            f"{block}.mlp.c_fc": ColwiseParallel(), f"{block}.mlp.c_proj": RowwiseParallel(output_layouts=Shard(1)),
        }  # fmt: skip
    return known


def _sequence(scene: Scene, model: Any) -> Loop:
    """Tensor parallel with the sequence cut between, as torchtitan does; with FSDP2 over the rest of the ranks."""
    tp = 2
    grid = mesh(("dp", scene.world // tp), ("tp", tp))
    parallelize_module(model, grid["tp"], _plan())
    for name, layer in model.layers.items():
        layer.rotary.start = grid["tp"].get_local_rank() * LENGTH // tp
        if scene.fault == "offset" and name == "2":
            layer.rotary.start = 0
    dp, data_rank = grid["dp"].size(), grid["dp"].get_local_rank()
    if dp > 1:
        for layer in model.layers.values():
            fully_shard(layer, mesh=grid["dp"])
        fully_shard(model, mesh=grid["dp"])
    optimizer = _optimizer(scene, model.parameters())

    def step(number: int) -> None:
        tokens = share(_batch(number), data_rank, dp)
        _loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)


def _staged(scene: Scene, model: Any) -> Loop:
    dp = 2 if scene.layout == "pp-dp" else 1
    grid = mesh(("pp", scene.world // dp), ("dp", dp))
    pp, data_rank = grid["pp"].get_local_rank(), grid["dp"].get_local_rank()
    size, group = grid["pp"].size(), grid["pp"].get_group()
    virtual = 2 if scene.layout == "interleaved" else 1
    numbers = [pp + size * i for i in range(virtual)]
    parts = [stage_module(model, number, size * virtual) for number in numbers]
    if scene.fault == "offset":
        for part in parts:
            for name, layer in part.layers.items():
                layer.rotary.start = 1 if name == "3" else 0
    if scene.fault == "stage not loaded" and pp == 1:
        torch.manual_seed(5)
        parts[0].layers["2"].block.attn.c_attn.reset_parameters()
    stages = [
        PipelineStage(part, number, size * virtual, torch.device("cpu"), group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    micro = 4
    loss = _sum if scene.fault == "loss not divided" else _loss
    scale = scene.fault not in ("micro-batches added", "loss not divided")
    if virtual > 1:
        schedule: Any = ScheduleInterleaved1F1B(stages, micro, loss, scale_grads=scale)
    else:
        kind = ScheduleGPipe if scene.layout == "gpipe" else Schedule1F1B
        schedule = kind(stages[0], micro, loss, scale_grads=scale)
    owned = nn.ModuleList(parts)
    optimizer = _optimizer(scene, owned.parameters())
    ends = [getattr(part, name) for part in parts for name in ("tok_embeddings", "output") if getattr(part, name)]

    def step(number: int) -> None:
        tokens = share(_batch(number), data_rank, dp)
        feed = (tokens[:, :-1],) if pp == 0 else ()
        target = {"target": tokens[:, 1:]} if pp == size - 1 else {}
        schedule.step(*feed, **target)
        if scene.has("tied") and scene.fault != "tied not summed":
            gradient = ends[0].weight.grad if ends else torch.zeros(VOCAB, WIDTH, dtype=scene.dtype)
            dist.all_reduce(gradient, group=group)
        if dp > 1:
            average_gradients(owned, grid["dp"].get_group())
            if scene.fault == "last stage divided twice" and pp == size - 1:
                for p in owned.parameters():
                    p.grad /= dp
        optimizer.step()
        optimizer.zero_grad()

    several = nn.ModuleDict({f"stage{number}": part for number, part in zip(numbers, parts, strict=True)})
    return Loop(several if virtual > 1 else stages[0], step)
