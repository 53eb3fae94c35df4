"""Trainings of the small model: one process, and every layout of several. Faults override single methods of them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from outside.layouts.model import LENGTH, VOCABULARY, BatchNorm, Net, Positions, TensorGroup, cut, make, stage_of

BATCH = 8


@dataclass(frozen=True)
class Layout:
    """How a training is spread: the size of each side of the mesh, and by which means."""

    name: str
    data: int = 1
    tensor: int = 1
    stages: int = 1
    accumulate: int = 1
    by: str = "hand"  # how data-parallel ranks work together: ddp, fsdp, hsdp, hand
    cut_by: str = "hand"  # how layers are cut: dtensor, hand
    sequence: bool = False
    strided: bool = False  # a rank has every n-th row of the batch, as with DistributedSampler
    schedule: str = "1f1b"
    experts: bool = False  # tensor-parallel ranks have whole experts, where a model has experts

    @property
    def world(self) -> int:
        """How many ranks it takes."""
        return self.data * self.tensor * self.stages

    @property
    def mesh(self) -> dict[str, int] | None:
        """What a user must say of the ranks, where nothing in the run tells it."""
        sides = {"pp": self.stages, "dp": self.data, "tp": self.tensor}
        sides = {name: size for name, size in sides.items() if size > 1}
        return sides if len(sides) > 1 else None


@dataclass(frozen=True)
class Setup:
    """What is the same in the reference and in the layout."""

    dtype: Any = torch.float32
    optimizer: str = "sgd"
    tied: bool = False
    batch_norm: bool = False
    masked: bool = False  # some tokens do not count, so that ranks have unequal numbers of them
    clip: float = 0.0
    ema: bool = False
    seed: int = 0
    steps: int = 3
    model: str = "net"
    options: tuple[str, ...] = ()


class Training:
    """One training. `step(number)` does all of a step."""

    def __init__(self, layout: Layout, setup: Setup) -> None:
        self.layout, self.setup = layout, setup
        rank = dist.get_rank() if layout.world > 1 else 0
        self.tensor_rank = rank % layout.tensor
        self.data_rank = rank // layout.tensor % layout.data
        self.stage_rank = rank // (layout.tensor * layout.data)
        self.rank = rank
        self.groups = self._groups()
        self.model: Any = self.build(self.initial())
        self.optimizer = self.make_optimizer()

    # What is built

    def initial(self) -> Net:
        """The model before it is spread."""
        model = make(self.setup.seed, tied=self.setup.tied, batch_norm=self.setup.batch_norm).to(self.setup.dtype)
        if self.setup.ema:
            assert model.head is not None
            model.head.register_buffer("average", model.head.weight.detach().clone())  # type: ignore[operator]
        return model

    def build(self, model: Net) -> nn.Module:
        """Spread the model over ranks."""
        layout = self.layout
        if layout.tensor > 1:
            model = self.cut(model)
        if self.setup.batch_norm and layout.data > 1:
            for module in model.modules():
                if isinstance(module, BatchNorm):
                    module.group = self.groups["dp"]
        if layout.by == "ddp" and layout.data > 1:
            return DistributedDataParallel(model, process_group=self.groups["dp"])
        if layout.by in ("fsdp", "hsdp"):
            return self.shard(model)
        return model

    def cut(self, model: Net) -> Net:
        """Cut layers over tensor-parallel ranks."""
        if self.layout.cut_by == "hand":
            return cut(model, TensorGroup(self.groups["tp"], self.layout.sequence))
        model = parallelize_module(model, self.device_mesh["tp"], self.plan())  # type: ignore[assignment]
        self.adapt(model)
        return model

    def adapt(self, model: Net) -> None:
        """Tell layers which part of the sequence and of the features they see."""
        for module in model.modules():
            if isinstance(module, Positions) and self.layout.sequence:
                module.offset = self.tensor_rank * LENGTH // self.layout.tensor
        for block in model.blocks.values():
            block.mlp.drop.part = self.tensor_rank  # type: ignore[union-attr]

    def plan(self) -> dict[str, Any]:
        """What parallelize_module is told."""
        inner: dict[str, Any] = {}
        for i in range(len(make().blocks)):
            for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
                inner[f"blocks.{i}.{name}"] = ColwiseParallel()
            for name in ("attn.out", "mlp.down"):
                inner[f"blocks.{i}.{name}"] = RowwiseParallel(
                    output_layouts=Shard(1) if self.layout.sequence else Replicate()
                )
        if not self.layout.sequence:
            return inner
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        for i in range(len(make().blocks)):
            inner |= {f"blocks.{i}.{name}": SequenceParallel(use_local_output=True) for name in ("norm1", "norm2")}
            inner |= {f"blocks.{i}.{name}": PrepareModuleInput(**whole) for name in ("attn", "mlp")}
            inner[f"blocks.{i}.router"] = SequenceParallel(use_local_output=True)
        return {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), **inner,
            "norm": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }  # fmt: skip

    def shard(self, model: Net) -> nn.Module:
        """FSDP2: blocks by themselves, then the rest."""
        mesh = self.device_mesh
        if self.layout.by == "fsdp":
            mesh = mesh["dp"]
        for part in self.parts(model):
            fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def parts(self, model: Any) -> list[nn.Module]:
        """What FSDP wraps by itself."""
        return list(model.blocks.values())

    @property
    def device_mesh(self) -> Any:
        """The mesh of all ranks."""
        if not hasattr(self, "_mesh"):
            layout = self.layout
            if layout.by == "hsdp":
                self._mesh = init_device_mesh("cpu", (2, layout.data // 2), mesh_dim_names=("replicate", "shard"))
            else:
                sides = {"pp": layout.stages, "dp": layout.data, "tp": layout.tensor}
                sides = {name: size for name, size in sides.items() if size > 1 or name == "dp"}
                self._mesh = init_device_mesh("cpu", tuple(sides.values()), mesh_dim_names=tuple(sides))
        return self._mesh

    def _groups(self) -> dict[str, Any]:
        """This rank's group along each side. Every rank makes all groups, in one order."""
        if self.layout.world == 1:
            return {}
        layout, mine = self.layout, dict[str, Any]()
        ranks = torch.arange(layout.world).reshape(layout.stages, layout.data, layout.tensor)
        for dimension, name in enumerate(("pp", "dp", "tp")):
            for line in ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist():
                group = dist.new_group(line)
                if self.rank in line:
                    mine[name] = group
        return mine

    def make_optimizer(self) -> Any:
        """Of this rank's parameters."""
        if self.setup.optimizer == "adamw":
            return torch.optim.AdamW(self.model.parameters(), 0.01)
        return torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    # What is done in a step

    def tokens(self, number: int) -> Tensor:
        """The batch of a step, for all ranks together."""
        generator = torch.Generator().manual_seed(1000 + number)
        return torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)

    def rows(self, number: int) -> Tensor:
        """Which rows of the batch this rank has."""
        rows = torch.arange(BATCH)
        if self.layout.strided:
            return rows[self.data_rank :: self.layout.data]
        return rows.chunk(self.layout.data)[self.data_rank]

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """What this rank reads, and what is to come out."""
        tokens = self.tokens(number)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        if self.setup.masked:
            targets[: BATCH // 2, LENGTH // 4 :] = -100
        rows = self.rows(number)
        return inputs[rows], targets[rows]

    def loss(self, logits: Tensor, targets: Tensor, number: int) -> Tensor:
        """The mean over all tokens of all ranks that count, times the ranks that gradients are averaged over."""
        if not self.setup.masked:
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total * self.layout.data * self.layout.accumulate / self.counted(number)

    def counted(self, number: int) -> int:
        """How many tokens count."""
        return BATCH // 2 * (LENGTH + LENGTH // 4)

    def forward_backward(self, number: int) -> None:
        """All micro-batches of a step."""
        inputs, targets = self.batch(number)
        parts = list(zip(inputs.chunk(self.layout.accumulate), targets.chunk(self.layout.accumulate), strict=True))
        for n, (x, y) in enumerate(parts):
            with self.without_sync(n < len(parts) - 1):
                (self.loss(self.model(x), y, number) / len(parts)).backward()

    def without_sync(self, apart: bool) -> Any:
        """Keep ranks from talking before the last micro-batch."""
        if self.layout.by in ("fsdp", "hsdp"):
            self.model.set_requires_gradient_sync(not apart)
        return self.model.no_sync() if apart and self.layout.by == "ddp" else contextlib.nullcontext()

    def reduce(self, number: int) -> None:
        """What is done to gradients between ranks by hand."""
        if self.layout.tensor > 1 and self.layout.cut_by == "hand" and self.layout.sequence:
            for name, parameter in self.model.named_parameters():
                if self.is_of_sequence(name):
                    dist.all_reduce(parameter.grad, group=self.groups["tp"])
        if self.layout.by == "hand" and self.layout.data > 1:
            for name, parameter in self.model.named_parameters():
                self.average(name, parameter, number)

    def is_of_sequence(self, name: str) -> bool:
        """Whether a rank sees only its part of the sequence there, so that gradients are partial."""
        return "norm" in name or "router" in name or name.endswith(("out.bias", "down.bias"))

    def average(self, name: str, parameter: Any, number: int) -> None:
        """Average a gradient over data-parallel ranks."""
        dist.all_reduce(parameter.grad, group=self.groups["dp"])
        parameter.grad.div_(self.layout.data)

    def clip(self) -> None:
        """Clip by the norm of all gradients."""
        if self.setup.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.setup.clip)

    def update(self, number: int) -> None:
        """The optimizer's step, and what follows."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.setup.ema:
            self.average_weights(number)

    def average_weights(self, number: int) -> None:
        """An exponential moving average of the head."""
        head = self.model.head
        head.average.lerp_(head.weight.detach(), 0.1)

    def step(self, number: int) -> None:
        """All of it."""
        self.forward_backward(number)
        self.reduce(number)
        self.clip()
        self.update(number)

    @property
    def watched(self) -> Any:
        """What is given to tt.watch."""
        return self.model


class PipelineTraining(Training):
    """Stages of a pipeline; what data-parallel copies of a stage share is averaged by hand."""

    def build(self, model: Net) -> nn.Module:
        """One stage."""
        part = self.part(model)
        if self.layout.tensor > 1:
            part = self.cut(part)
        self.stage = PipelineStage(
            part, self.stage_rank, self.layout.stages, torch.device("cpu"), group=self.groups["pp"]
        )
        kind = ScheduleGPipe if self.layout.schedule == "gpipe" else Schedule1F1B
        self.micro = max(self.layout.accumulate, self.layout.stages if self.layout.schedule == "1f1b" else 2)
        self.schedule = kind(self.stage, n_microbatches=self.micro, loss_fn=self.micro_loss)
        return part

    def part(self, model: Net) -> Net:
        """What this stage has of the model."""
        return stage_of(model, self.stage_rank, self.layout.stages)

    def micro_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of a micro-batch; the schedule averages gradients over them."""
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def forward_backward(self, number: int) -> None:
        """One step of the schedule."""
        inputs, targets = self.batch(number)
        first, last = self.stage_rank == 0, self.stage_rank == self.layout.stages - 1
        self.schedule.step(*((inputs,) if first else ()), **({"target": targets} if last else {}))

    def reduce(self, number: int) -> None:
        """The tied embedding is in two stages, and its gradient the sum of both."""
        if self.setup.tied:
            self.reduce_tied()
        super().reduce(number)

    def reduce_tied(self) -> None:
        """Sum the gradient of the first and the last stage."""
        names = {0: "embed", self.layout.stages - 1: "head"}
        ends = getattr(self.model, names.get(self.stage_rank, ""), None)
        gradient = torch.zeros(VOCABULARY, 16, dtype=self.setup.dtype) if ends is None else ends.weight.grad
        dist.all_reduce(gradient, group=self.groups["pp"])

    @property
    def watched(self) -> Any:
        """The stage."""
        return self.stage
