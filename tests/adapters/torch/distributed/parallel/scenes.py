"""Ways to train one small model in parallel: how each builds it, and what one of its steps does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Sizes that no number of ranks divides evenly, but for the hidden one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 12)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        """A residual."""
        normed: Tensor = self.norm(x + self.fc2(self.act(self.fc1(x))))
        return normed


class Net(nn.Module):
    """Two blocks between two linear layers."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 7)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """Activations of blocks are recomputed for backward when that was asked for."""
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        result: Tensor = self.head(x)
        return result


def nothing() -> None:
    """What is done before the optimizer's step when nobody looks."""


class Scene:
    """One way to train."""

    prefix = ""  # of the names that sites have in the run
    firsts: tuple[int, ...] = (0,)  # the ranks that count where others hold the same
    rehearsals = 0  # calls of the model on made-up tensors in the first step

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def batch(self, step: int, micro: int = 0) -> Tensor:
        """Each rank its own."""
        return self._batch(100 * step + 10 * micro + self.rank)

    def same_batch(self, step: int, rows: int = 3) -> Tensor:
        """The same for all ranks."""
        return self._batch(100 * step, rows)

    def watched(self, model: Any) -> Any:
        """What is given to `tt.watch`."""
        return model

    def share(self, name: str) -> str:
        """Whether ranks hold pieces of an output or all the same."""
        return "cat"

    def _batch(self, seed: int, rows: int = 3) -> Tensor:
        return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))


def update(optimizer: Any, before: Callable[[], None]) -> None:
    """One step of an optimizer."""
    before()
    optimizer.step()
    optimizer.zero_grad()


class Ddp(Scene):
    """Micro-batches with no reduction in between."""

    def build(self) -> Any:
        """The model and its step."""
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(number: int, before: Callable[[], None] = nothing) -> None:
            with model.no_sync():
                model(self.batch(number, 0)).square().mean().backward()
            model(self.batch(number, 1)).square().mean().backward()
            update(optimizer, before)

        return model, step


class Inner(Ddp):
    """The module inside the wrapper is watched, under its own names."""

    def watched(self, model: Any) -> Any:
        """Without the wrapper."""
        return model.module


class Fsdp(Scene):
    """Shards of uneven size, recomputed activations, micro-batches with no reduction in between."""

    mesh: Any = None

    def model(self) -> Any:
        """Blocks are sharded by themselves."""
        model: Any = Net(recompute=True)
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)

    def build(self) -> Any:
        """The model and its step."""
        model = self.model()
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)

        def step(number: int, before: Callable[[], None] = nothing) -> None:
            model.set_requires_gradient_sync(False)
            model(self.batch(number, 0)).square().mean().backward()
            model.set_requires_gradient_sync(True)
            model(self.batch(number, 1)).square().mean().backward()
            update(optimizer, before)

        return model, step


class Hybrid(Fsdp):
    """FullyShardedParameters along one side of the mesh, copied along the other."""

    def model(self) -> Any:
        """As above, on a mesh of two sides."""
        self.mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("copies", "shards"))
        return super().model()


class Tensors(Scene):
    """Tensor-parallel layers; those of the second block hand DTensors to each other."""

    def mesh(self) -> Any:
        """All ranks."""
        return init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))

    def parallel(self, model: Any, mesh: Any) -> Any:
        """Columns, then rows."""
        plan = {
            "blocks.0.fc1": ColwiseParallel(),
            "blocks.0.fc2": RowwiseParallel(),
            "blocks.1.fc1": ColwiseParallel(use_local_output=False),
            "blocks.1.fc2": RowwiseParallel(input_layouts=Shard(-1)),
        }
        return parallelize_module(model, mesh, plan)

    def build(self) -> Any:
        """The model and its step."""
        model = self.parallel(Net(), self.mesh())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(number: int, before: Callable[[], None] = nothing) -> None:
            model(self.same_batch(number)).square().mean().backward()
            update(optimizer, before)

        return model, step

    def share(self, name: str) -> str:
        """Between columns and rows each rank has its piece."""
        return "cat" if name.endswith(("fc1", "act")) else "same"


class Grid(Tensors):
    """Tensor-parallel along one side of the mesh, sharded with batches of their own along the other."""

    firsts = (0, 2)

    def build(self) -> Any:
        """The model and its step."""
        mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
        model: Any = self.parallel(Net(), mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(number: int, before: Callable[[], None] = nothing) -> None:
            model(self._batch(100 * number + mesh.get_local_rank("dp"))).square().mean().backward()
            update(optimizer, before)

        return model, step


class Pipeline(Scene):
    """As many stages as ranks, each a block with a linear layer of its own; four microbatches."""

    schedule: Any
    rehearsals = 1

    def build(self) -> Any:
        """The stage and its step."""
        self.prefix = f"stage{self.rank}."
        blocks = [nn.Sequential(nn.Linear(5, 6) if i == 0 else nn.Linear(6, 6), Block()) for i in range(self.world)]
        module = blocks[self.rank]
        self.stage = PipelineStage(module, self.rank, self.world, torch.device("cpu"))
        loss = lambda output, target: (output - target).square().mean()  # noqa: E731
        schedule = self.schedule(self.stage, n_microbatches=4, loss_fn=loss)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)

        def step(number: int, before: Callable[[], None] = nothing) -> None:
            first, last = self.rank == 0, self.rank == self.world - 1
            given = (self.same_batch(number, 8),) if first else ()
            schedule.step(*given, **({"target": torch.zeros(8, 6)} if last else {}))
            update(optimizer, before)

        return module, step

    def watched(self, model: Any) -> Any:
        """The stage, so that names tell stages apart."""
        return self.stage
