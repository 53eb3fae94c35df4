"""Faults and correct trainings of the decoder and the convolutions. Expected answers were written before the first run.

Where a fault lies between a module and the one that holds it, both are right answers: `module` is then a tuple.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outside.layouts.faults import Fault
from outside.layouts.scored.convnet import SyncNorm
from outside.layouts.scored.decoder import Lora, Mixture
from outside.layouts.scored.trainings import ConvTraining, DecoderPipeline, DecoderTraining, fully_shard
from outside.layouts.training import Layout, Setup

GRID = Layout("decoder dp2-tp2", data=2, tensor=2)
FSDP_GRID = Layout("decoder fsdp2-tp2", data=2, tensor=2, by="fsdp", cut_by="dtensor")
SEQUENCE = Layout("decoder tp2-sequence", tensor=2, sequence=True)
SPREAD = Layout("decoder ep2", tensor=2, experts=True)
PIPELINE = Layout("decoder pp2-accumulate4", stages=2, accumulate=4)
PIPELINE_GRID = Layout("decoder pp2-dp2-accumulate4", stages=2, data=2, accumulate=4)
DDP, DDP_4 = Layout("ddp2", data=2, by="ddp"), Layout("ddp4", data=4, by="ddp")
HAND_4 = Layout("hand4", data=4)
FSDP, HSDP = Layout("fsdp2", data=2, by="fsdp"), Layout("hsdp4", data=4, by="hsdp")
DECODER, CONVNET = Setup(model="decoder"), Setup(model="convnet")


class NormNotReduced(DecoderTraining):
    """The last norm's gradient stays that of a rank's part of the sequence."""

    def is_of_sequence(self, name: str) -> bool:
        return name != "norm.weight" and super().is_of_sequence(name)


class SameKeys(DecoderTraining):
    """Every rank loads the first head of keys of the second layer."""

    def cut(self, model: Any) -> Any:
        whole = model.layers["1"].attn.k.weight.data.clone()
        model = super().cut(model)
        model.layers["1"].attn.k.weight.data.copy_(whole.chunk(self.layout.tensor)[0])
        return model


class GatesNotSummed(DecoderTraining):
    """Where experts are spread, the gradient of the gates is each rank's own."""

    def cut(self, model: Any) -> Any:
        model = super().cut(model)
        for module in model.modules():
            if isinstance(module, Mixture):
                module.summed_backward = False
        return model


class NoisyRouter(DecoderTraining):
    """The second rank's router of the first layer adds noise that is meant for nobody."""

    def build(self, model: Any) -> nn.Module:
        if self.rank == 1:
            model.layers["0"].moe.router.register_forward_hook(_noisy)
        return super().build(model)


def _noisy(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return output + 0.01 * torch.randn(output.shape, generator=generator).to(output.dtype)


class ScaledByPart(DecoderTraining):
    """The difference of low rank is scaled by the part of the rank that a process has."""

    def cut(self, model: Any) -> Any:
        model = super().cut(model)
        for module in model.modules():
            if isinstance(module, Lora):
                module.scale *= self.layout.tensor
        return model


class LoraOfRank(DecoderTraining):
    """The last rank draws its own difference of low rank."""

    def build(self, model: Any) -> nn.Module:
        if self.rank == 3:
            generator = torch.Generator().manual_seed(11)
            weight = model.layers["0"].attn.q.a.weight.data
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        return super().build(model)


class HeadNotTied(DecoderPipeline):
    """The last stage's copy of the tied embedding was not loaded."""

    def part(self, model: Any) -> Any:
        part = super().part(model)
        if part.head is not None:
            part.head.weight.data.mul_(0.9)
        return part


class DividedByMicroBatchesTwice(DecoderPipeline):
    """The loss is averaged over micro-batches by the user, and by the schedule again."""

    def micro_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().micro_loss(logits, targets) / self.layout.accumulate


class PartsAveragedOverAll(DecoderTraining):
    """A gradient that tensor-parallel ranks hold parts of is averaged over all ranks."""

    def average(self, name: str, parameter: Any, number: int) -> None:
        if name == "layers.0.attn.out.weight":
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        else:
            super().average(name, parameter, number)


class CopiesCountedTwice(DecoderTraining):
    """The norm that gradients are clipped by counts what ranks share once for each of them."""

    def squares(self) -> float:
        total = torch.zeros(1)
        for parameter in self.model.parameters():
            total += parameter.grad.float().square().sum()
        dist.all_reduce(total, group=self.groups["tp"])
        return float(total)


class BalanceOfRank(DecoderTraining):
    """The loss that evens out experts looks at each rank's own tokens."""

    def build(self, model: Any) -> nn.Module:
        for module in model.modules():
            if isinstance(module, Mixture):
                module.batch_group = None
        return super().build(model)


class ForgottenMoments(DecoderTraining):
    """The second rank lost the optimizer's state after the first step."""

    def update(self, number: int) -> None:
        if number == 1 and self.rank == 1:
            self.optimizer.state.clear()
        super().update(number)


class SkippedStep(DecoderTraining):
    """One rank finds an overflow that is none, and skips its second step."""

    def update(self, number: int) -> None:
        if number == 1 and self.rank == 2:
            self.optimizer.zero_grad()
        else:
            super().update(number)


class RowsOfNeighbour(DecoderTraining):
    """In the third step the last rank reads its neighbour's rows."""

    def rows(self, number: int) -> Tensor:
        if number == 2 and self.data_rank == self.layout.data - 1:
            return torch.arange(8).chunk(self.layout.data)[self.data_rank - 1]
        return super().rows(number)


class LocalGradientOfMoments(ConvTraining):
    """One norm's statistics are those of all ranks, their gradients are not."""

    def initial(self) -> Any:
        model = super().initial()
        if self.layout.data > 1:
            model.blocks["0"].first.norm.backward_sum = ""
        return model


class _LocalMemory(SyncNorm):
    def remember(self, x: Tensor, mean: Tensor, variance: Tensor) -> None:
        super().remember(x, mean, x.detach().var((0, 2, 3)))


class LocalRunningVariance(ConvTraining):
    """One norm remembers the variance of a rank's own images."""

    def initial(self) -> Any:
        model = super().initial()
        model.stem.norm.__class__ = _LocalMemory
        return model


class NotReplicated(ConvTraining):
    """One block is sharded over half of the ranks, and nobody averages its gradient over the other half."""

    def shard(self, model: Any) -> nn.Module:
        for name, block in model.blocks.items():
            fully_shard(block, mesh=self.device_mesh["shard"] if name == "1" else self.device_mesh)
        return fully_shard(model, mesh=self.device_mesh)


class FlippedBuffer(ConvTraining):
    """After the second step one bit of a running variance is another on one rank."""

    def update(self, number: int) -> None:
        super().update(number)
        if number == 1 and self.rank == 3:
            for module in self.model.modules():
                if isinstance(module, SyncNorm):
                    module.running_var.view(torch.int32)[1] ^= 1 << 3  # type: ignore[operator]
                    return


FAULTS = (
    Fault("RMSNorm not reduced over the sequence", SEQUENCE, NormNotReduced, ("gradient",), "norm", setup=DECODER),
    Fault("same head of keys on all ranks", SPREAD, SameKeys, ("parameter",), "layers.1.attn.k", setup=DECODER),
    Fault("gradient of gates not summed", SPREAD, GatesNotSummed, ("backward",),
          ("layers.1.moe", "layers.1.moe.router"), setup=DECODER),
    Fault("noise in one rank's router", DDP, NoisyRouter, ("forward",), "layers.0.moe.router", setup=DECODER),
    Fault("LoRA scaled by a part of its rank", GRID, ScaledByPart, ("forward",), "layers.0.attn.q",
          setup=replace(DECODER, options=("lora",))),
    Fault("LoRA initialised by rank", HAND_4, LoraOfRank, ("parameter",), "layers.0.attn.q.a", rank=3,
          setup=replace(DECODER, options=("lora",))),
    Fault("last stage's tied embedding not loaded", PIPELINE, HeadNotTied, ("parameter",), ("embed", "head"),
          setup=replace(DECODER, tied=True)),
    Fault("divided by micro-batches twice", PIPELINE_GRID, DividedByMicroBatchesTwice, ("gradient",), None,
          setup=DECODER),
    Fault("parts averaged over all ranks", GRID, PartsAveragedOverAll, ("gradient",), "layers.0.attn.out",
          setup=DECODER),
    Fault("copies counted twice when clipping", GRID, CopiesCountedTwice, ("update",), None,
          setup=replace(DECODER, clip=0.5)),
    Fault("balance of experts by rank", DDP, BalanceOfRank, ("backward", "loss"),
          ("layers.1.moe", "layers.1.moe.router"), setup=replace(DECODER, options=("balance",))),
    Fault("optimizer state lost on one rank", Layout("hand2", data=2), ForgottenMoments, ("update",), None, step=1,
          rank=1, setup=replace(DECODER, optimizer="adamw")),
    Fault("step skipped on one rank", HAND_4, SkippedStep, ("update", "gradient"), None, step=1, rank=2,
          setup=DECODER),
    Fault("step skipped on one rank, by replicas", HAND_4, SkippedStep, ("replicas_differ",), "embed", step=1, rank=2,
          setup=DECODER, by="replicas"),
    Fault("rows of the neighbour", DDP_4, RowsOfNeighbour, ("input",), "", step=2, setup=DECODER),
    Fault("statistics' gradients not summed", DDP, LocalGradientOfMoments, ("backward",), "blocks.0.first.norm",
          setup=CONVNET),
    Fault("running variance of a rank's own", DDP_4, LocalRunningVariance, ("buffer",), "stem.norm", setup=CONVNET),
    Fault("block not averaged over replicas", HSDP, NotReplicated, ("gradient",), "blocks.1.first.conv",
          setup=CONVNET),
    # buffers are recorded when the step closes (while they were when the optimizer steps, the answer was step 2)
    Fault("flipped bit in a buffer", HAND_4, FlippedBuffer, ("replicas_differ",), "stem.norm", step=1, rank=3,
          setup=CONVNET, by="replicas"),
)  # fmt: skip

_ALL = (
    DDP, Layout("ddp4-strided", data=4, by="ddp", strided=True),
    Layout("ddp2-accumulate2", data=2, by="ddp", accumulate=2), FSDP, HSDP, GRID, FSDP_GRID, SEQUENCE, SPREAD,
    PIPELINE, PIPELINE_GRID, Layout("decoder dp2-ep2", data=2, tensor=2, experts=True),
    Layout("decoder dp2-tp2-sequence", data=2, tensor=2, sequence=True),
)  # fmt: skip
CORRECT = tuple(
    (layout, option, setup)
    for option, setup, layouts in (
        ("", DECODER, _ALL),
        ("lora", replace(DECODER, options=("lora",)), (DDP, HAND_4, GRID, FSDP)),
        ("tied", replace(DECODER, tied=True), (PIPELINE, FSDP, GRID)),
        ("adamw", replace(DECODER, optimizer="adamw"), (GRID, FSDP_GRID, PIPELINE_GRID, HSDP)),
        ("clip", replace(DECODER, clip=0.5), (GRID, DDP)),
        ("balance", replace(DECODER, options=("balance",)), (DDP, GRID)),
        ("images", CONVNET, (DDP, DDP_4, FSDP, HSDP, HAND_4)),
        ("images adamw", replace(CONVNET, optimizer="adamw"), (DDP_4, HSDP)),
    )
    for layout in layouts
)
FP32_ONLY = tuple(  # choices between experts are no continuous function: rounding in bf16 makes other ones
    (layout, "two experts", replace(DECODER, options=("chosen",))) for layout in (DDP, GRID, SPREAD, FSDP_GRID)
)
