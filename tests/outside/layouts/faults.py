"""Silent faults of parallel training, each planted by overriding one method, and where it must be found."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from outside.layouts.model import Columns, Dropout, Net, Positions, Rows, TensorGroup, cut, region
from outside.layouts.training import Layout, PipelineTraining, Setup, Training


class Fault(NamedTuple):
    """A training with a fault, and the answer: the stage at which it first shows, the module, the step, the rank.

    `module` None stands for all of them, as for a wrong divisor; a tuple for any of several. `by` is who must find it:
    `diff`, or `replicas` where a run is compared with itself.
    """

    name: str
    layout: Layout
    make: Callable[[Layout, Setup], Training]
    kinds: tuple[str, ...]
    module: str | tuple[str, ...] | None
    step: int = 0
    rank: int | None = None
    setup: Setup = Setup()
    by: str = "diff"


class NormNotReduced(Training):
    """Gradients of norms on parts of the sequence stay partial."""

    def is_of_sequence(self, name: str) -> bool:
        return "norm" not in name and super().is_of_sequence(name)


class RouterNotReduced(Training):
    """The router's gradient stays partial."""

    def is_of_sequence(self, name: str) -> bool:
        return "router" not in name and super().is_of_sequence(name)


class DividedTwice(Training):
    """Averaged by the communication, and divided by the number of ranks again."""

    def average(self, name: str, parameter: Any, number: int) -> None:
        super().average(name, parameter, number)
        parameter.grad.div_(self.layout.data)


class NotDivided(Training):
    """Summed where the reference averages."""

    def average(self, name: str, parameter: Any, number: int) -> None:
        dist.all_reduce(parameter.grad, group=self.groups["dp"])


class SameDropout(Training):
    """All tensor-parallel ranks draw the first one's mask."""

    def cut(self, model: Net) -> Net:
        model = super().cut(model)
        for module in model.modules():
            if isinstance(module, Dropout):
                module.part = 0
        return model


class WrongOffset(PipelineTraining):
    """The second stage begins to count positions at one."""

    def build(self, model: Net) -> nn.Module:
        part: Any = super().build(model)
        for name, module in part.named_modules():
            if isinstance(module, Positions) and name.startswith("blocks.1"):
                module.offset = 1
        return part  # type: ignore[no-any-return]


class TiedNotSummed(PipelineTraining):
    """Each of the two stages keeps its own gradient of the tied embedding."""

    def reduce_tied(self) -> None:
        pass


class MeanOfRank(Training):
    """The loss is averaged over each rank's own tokens, of which ranks have unequal numbers."""

    def loss(self, logits: Tensor, targets: Tensor, number: int) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class StaleAfterLoad(Training):
    """One rank did not load a parameter of the checkpoint."""

    def build(self, model: Net) -> nn.Module:
        if self.rank == 1:
            with torch.no_grad():
                model.get_parameter("blocks.1.mlp.up.weight").mul_(0.9)
        return super().build(model)


class SameShard(Training):
    """Every rank reads the first one's rows."""

    def rows(self, number: int) -> Tensor:
        return torch.arange(8).chunk(self.layout.data)[0]


class NoSetEpoch(Training):
    """The second epoch has the first one's order."""

    def tokens(self, number: int) -> Tensor:
        return super().tokens(0 if number == 1 else number)


class LocalClip(Training):
    """Clipped by the norm of what this rank holds: `clip_grad_norm_` of plain tensors knows of no other rank."""


class WrongDimension(Training):
    """One weight was cut along the other dimension."""

    def cut(self, model: Net) -> Net:
        return cut(model, TensorGroup(self.groups["tp"]), wrong_dimension="blocks.0.attn.q")


class ReducedInBf16(Training):
    """Gradients are communicated in bf16."""

    def build(self, model: Net) -> nn.Module:
        wrapped: Any = super().build(model)
        wrapped.register_comm_hook(None, lambda state, bucket: _in_bf16(bucket))
        return wrapped  # type: ignore[no-any-return]


def _in_bf16(bucket: Any) -> Any:
    low = bucket.buffer().to(torch.bfloat16) / dist.get_world_size()
    work = dist.all_reduce(low, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(low))


class FlippedBit(Training):
    """One bit of one parameter is flipped on one rank, after the first step."""

    def update(self, number: int) -> None:
        super().update(number)
        if number == 0 and self.rank == 2:
            weight = self.model.get_parameter("blocks.0.mlp.up.weight").data
            weight.view(torch.int32).view(-1)[5] ^= 1 << 2


class Unsynchronised(Training):
    """BatchNorm takes each rank's own mean."""

    def build(self, model: Net) -> nn.Module:
        built = super().build(model)
        for module in built.modules():
            if hasattr(module, "group"):
                module.group = None  # type: ignore[assignment]
        return built


class ScaledRate(Training):
    """One rank's learning rate is twice the others'."""

    def make_optimizer(self) -> Any:
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["lr"] *= 2 if self.rank == 1 else 1
        return optimizer


class FrozenOnOneRank(Training):
    """One rank does not train the head."""

    def make_optimizer(self) -> Any:
        optimizer = super().make_optimizer()
        if self.rank == 1:
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is not self.model.head.weight]
        return optimizer


class BoundaryOffByOne(Training):
    """Ranks talk after the first micro-batch instead of the last."""

    def without_sync(self, apart: bool) -> Any:
        return contextlib.nullcontext() if apart else self.model.no_sync()


class DroppedByFsdp(Training):
    """The wrapping leaves out the last norm: it is neither sharded nor reduced."""

    def shard(self, model: Net) -> nn.Module:
        for block in model.blocks.values():
            fully_shard(block, mesh=self.device_mesh["dp"])
        assert model.norm is not None
        return fully_shard(model, mesh=self.device_mesh["dp"], ignored_params=set(model.norm.parameters()))


class StaleOffload(Training):
    """After the second step one rank gets back the copy of a parameter from before it."""

    def update(self, number: int) -> None:
        weight = self.model.get_parameter("blocks.0.attn.v.weight").data
        copy = weight.clone()
        super().update(number)
        if number == 1 and self.rank == 1:
            weight.copy_(copy)


class AverageOnOneRank(Training):
    """The moving average is kept on the first rank alone."""

    def average_weights(self, number: int) -> None:
        if self.rank == 0:
            super().average_weights(number)


class SeedOfRank(Training):
    """Each rank makes its own initial parameters."""

    def initial(self) -> Net:
        model = super().initial()
        if self.rank == 1:
            with torch.no_grad():
                torch.manual_seed(7)
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
        return model


class _RowsNotSummed(Rows):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class _BiasEverywhere(Rows):
    def forward(self, x: Tensor) -> Tensor:
        assert self.over is not None
        return region(functional.linear(x, self.weight, self.bias), self.over.group, "sum", "")


class _ColumnsNotSummed(Columns):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def exchanged(name: str, kind: type[nn.Module]) -> type[Training]:
    """A training in which one layer is of another kind."""

    class Exchanged(Training):
        def cut(self, model: Net) -> Net:
            model = super().cut(model)
            model.get_submodule(name).__class__ = kind
            return model

    return Exchanged


class NotDividedByMicroBatches(Training):
    """Gradients of micro-batches are added up and not averaged."""

    def loss(self, logits: Tensor, targets: Tensor, number: int) -> Tensor:
        return super().loss(logits, targets, number) * self.layout.accumulate


class WrongGroup(Training):
    """Gradients are averaged over the tensor-parallel group."""

    def average(self, name: str, parameter: Any, number: int) -> None:
        if "norm" in name or "embed" in name or "head" in name:
            dist.all_reduce(parameter.grad, group=self.groups["tp"])
            parameter.grad.div_(self.layout.data)
        else:
            super().average(name, parameter, number)


class SkippedParameter(Training):
    """One parameter is left out of the reduction."""

    def average(self, name: str, parameter: Any, number: int) -> None:
        if name != "blocks.1.router.weight":
            super().average(name, parameter, number)


TWO, FOUR = Layout("hand2", data=2), Layout("hand4", data=4)
CUT, SEQUENCE = Layout("tensor2-hand", tensor=2), Layout("tensor2-sequence-hand", tensor=2, sequence=True)
DDP, FSDP = Layout("ddp2", data=2, by="ddp"), Layout("fsdp2", data=2, by="fsdp")
GRADIENT = ("gradient",)

FAULTS = (
    Fault("layer norm not reduced", SEQUENCE, NormNotReduced, GRADIENT, "blocks.0.norm1"),
    Fault("router not reduced", SEQUENCE, RouterNotReduced, GRADIENT, "blocks.0.router"),
    Fault("layer norm not reduced, 4 ranks", Layout("tensor4-sequence-hand", tensor=4, sequence=True), NormNotReduced,
          GRADIENT, "blocks.0.norm1"),
    Fault("divided by the world size twice", TWO, DividedTwice, GRADIENT, None),
    Fault("summed instead of averaged", FOUR, NotDivided, GRADIENT, None),
    Fault("same dropout seed on tensor-parallel ranks", CUT, SameDropout, ("forward",), "blocks.0.mlp.drop"),
    Fault("position offset in a pipeline stage", Layout("pipeline2", stages=2), WrongOffset, ("forward",),
          "blocks.1.position"),
    Fault("position offset in a pipeline stage, 4 ranks", Layout("pipeline4", stages=4), WrongOffset, ("forward",),
          "blocks.1.position"),
    Fault("tied embedding not summed", Layout("pipeline2", stages=2), TiedNotSummed, GRADIENT, "embed",
          setup=Setup(tied=True)),
    Fault("loss averaged per rank", DDP, MeanOfRank, ("loss",), "head", setup=Setup(masked=True)),
    Fault("stale parameter after load", FOUR, StaleAfterLoad, ("parameter",), "blocks.1.mlp.up", rank=1),
    Fault("same shard on all ranks", DDP, SameShard, ("input",), ""),
    Fault("no set_epoch", DDP, NoSetEpoch, ("input",), "", step=1),
    Fault("clipped by the local norm", CUT, LocalClip, ("update",), None, setup=Setup(clip=0.5)),
    Fault("wrong shard dimension", CUT, WrongDimension, ("parameter",), "blocks.0.attn.q"),
    Fault("gradients reduced in bf16", DDP, ReducedInBf16, GRADIENT, None),
    Fault("one flipped mantissa bit", FOUR, FlippedBit, ("replicas_differ",), "blocks.0.mlp.up", step=1, rank=2,
          by="replicas"),
    Fault("batch norm not synchronised", DDP, Unsynchronised, ("forward",), "norm", setup=Setup(batch_norm=True)),
    Fault("learning rate scaled on one rank", TWO, ScaledRate, ("update",), None, rank=1),
    Fault("parameter frozen on one rank", TWO, FrozenOnOneRank, ("update",), "head", rank=1),
    Fault("accumulation boundary off by one", Layout("ddp2-accumulate2", data=2, by="ddp", accumulate=2),
          BoundaryOffByOne, GRADIENT, None),
    Fault("parameter dropped by FSDP's wrapping", FSDP, DroppedByFsdp, GRADIENT, "norm"),
    Fault("stale copy from CPU offload", TWO, StaleOffload, ("parameter",), "blocks.0.attn.v", step=2, rank=1),
    # buffers are recorded when the step closes (while they were when the optimizer steps, the answer was step 1)
    Fault("moving average on rank 0 only", TWO, AverageOnOneRank, ("buffer",), "head", step=0, rank=1,
          setup=Setup(ema=True)),
    Fault("initial parameters differ by rank", TWO, SeedOfRank, ("parameter",), None, rank=1),
    Fault("row-parallel layer not summed", CUT, exchanged("blocks.0.attn.out", _RowsNotSummed), ("forward",),
          "blocks.0.attn.out"),
    Fault("bias added on every rank", CUT, exchanged("blocks.1.mlp.down", _BiasEverywhere), ("forward",),
          "blocks.1.mlp.down"),
    Fault("column-parallel layer not summed backward", CUT, exchanged("blocks.0.mlp.up", _ColumnsNotSummed),
          ("backward",), "blocks.0.mlp.up"),
    Fault("gradients of micro-batches added", Layout("accumulate2", accumulate=2), NotDividedByMicroBatches, GRADIENT,
          None),
    Fault("reduced over the wrong group", Layout("hand2-tensor2", data=2, tensor=2), WrongGroup, GRADIENT, "embed"),
    Fault("parameter left out of the reduction", FOUR, SkippedParameter, GRADIENT, "blocks.1.router"),
)  # fmt: skip
