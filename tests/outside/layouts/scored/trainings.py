"""Trainings of the decoder and of the convolutions in every layout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

from outside.layouts.model import TensorGroup
from outside.layouts.scored.convnet import CLASSES, SIZE, ConvNet, SyncNorm
from outside.layouts.scored.decoder import EXPERTS, Decoder, Mixture, cut_decoder, decoder_stage, make_decoder
from outside.layouts.training import BATCH, PipelineTraining, Training

COLUMNS, ROWS = ("attn.q", "attn.k", "attn.v"), ("attn.out",)


class DecoderTraining(Training):
    """The decoder. Options: lora, chosen (two experts a token), balance (a loss that evens out experts)."""

    def initial(self) -> Decoder:  # type: ignore[override]
        """The model before it is spread."""
        options = self.setup.options
        model = make_decoder(
            self.setup.seed, lora="lora" in options, chosen=2 if "chosen" in options else 0, tied=self.setup.tied
        ).to(self.setup.dtype)
        for module in model.modules():
            if isinstance(module, Mixture) and self.layout.data > 1:
                module.batch_group = self.groups["dp"]
        return model

    def cut(self, model: Any) -> Any:
        """By hand or by DTensor."""
        if self.layout.cut_by == "hand":
            return cut_decoder(model, TensorGroup(self.groups["tp"], self.layout.sequence), experts=self.layout.experts)
        return super().cut(model)

    def adapt(self, model: Any) -> None:
        """Nothing in it depends on the rank."""

    def plan(self) -> dict[str, Any]:
        """What parallelize_module is told."""
        columns = [*COLUMNS, *(f"moe.experts.{n}.{name}" for n in range(EXPERTS) for name in ("gate", "up"))]
        rows = [*ROWS, *(f"moe.experts.{n}.down" for n in range(EXPERTS))]
        known = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        return {f"layers.{i}.{name}": how for i in range(2) for name, how in known.items()}

    def parts(self, model: Any) -> list[nn.Module]:
        """What FSDP wraps by itself."""
        return list(model.layers.values())

    def loss(self, logits: Tensor, targets: Tensor, number: int) -> Tensor:
        """Cross-entropy, and how unevenly experts are used."""
        loss = super().loss(logits, targets, number)
        if "balance" in self.setup.options:
            for module in self.model.modules():
                if isinstance(module, Mixture):
                    loss = loss + 0.1 * module.balance
        return loss

    def average(self, name: str, parameter: Any, number: int) -> None:
        """Frozen parameters have no gradient."""
        if parameter.grad is not None:
            super().average(name, parameter, number)

    def is_of_sequence(self, name: str) -> bool:
        """Norms and routers see a part of the sequence."""
        return "norm" in name or "router" in name

    def is_cut(self, name: str) -> bool:
        """Whether tensor-parallel ranks hold other parts of a parameter."""
        return any(f".{part}." in name for part in ("q", "k", "v", "out", "experts"))

    def clip(self) -> None:
        """Clip by the norm of all gradients; what ranks hold parts of is summed over them."""
        if not self.setup.clip or self.layout.tensor == 1 or self.layout.cut_by != "hand":
            super().clip()
            return
        squares = self.squares()
        factor = min(1.0, self.setup.clip / (math.sqrt(squares) + 1e-6))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def squares(self) -> float:
        """The sum of squares of all gradients, each counted once."""
        sums = {cut: torch.zeros(1) for cut in (True, False)}
        for name, parameter in self.model.named_parameters():
            sums[self.is_cut(name)] += parameter.grad.float().square().sum()
        dist.all_reduce(sums[True], group=self.groups["tp"])
        return float(sums[True] + sums[False])


class DecoderPipeline(DecoderTraining, PipelineTraining):
    """Two stages of the decoder."""

    def part(self, model: Any) -> Any:
        """One stage."""
        return decoder_stage(model, self.stage_rank)


class ConvTraining(Training):
    """The convolutions, on images."""

    def initial(self) -> ConvNet:  # type: ignore[override]
        """The model before it is spread; buffers stay in single precision."""
        with torch.random.fork_rng():
            torch.manual_seed(self.setup.seed)
            model = ConvNet()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(self.setup.dtype)
        for module in model.modules():
            if isinstance(module, SyncNorm) and self.layout.data > 1:
                module.group = self.groups["dp"]
        return model

    def parts(self, model: Any) -> list[nn.Module]:
        """What FSDP wraps by itself."""
        return list(model.blocks.values())

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Images and classes."""
        generator = torch.Generator().manual_seed(2000 + number)
        images = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator).to(self.setup.dtype)
        classes = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        rows = self.rows(number)
        return images[rows], classes[rows]

    def loss(self, logits: Tensor, targets: Tensor, number: int) -> Tensor:
        """The mean over images."""
        return functional.cross_entropy(logits, targets)


__all__ = ["ConvTraining", "DecoderPipeline", "DecoderTraining", "fully_shard"]
