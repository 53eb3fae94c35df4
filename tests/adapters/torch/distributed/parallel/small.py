"""Short scenarios for two ranks: who records, where, what ranks share, and what goes wrong on one of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byhand import collectives, digest
from scenes import Ddp, Fsdp, Net, Tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import tensortap as tt
from tensortap.errors import ProbeError


def planted(path: Path) -> Any:
    """A reducer that does what no tap of ours may do: the count must notice it."""

    def sneak(tensor: Any) -> float:
        total = torch.ones(())
        dist.all_reduce(total)
        return float(total)

    def run(watched: bool) -> None:
        _, step = scene.build()
        if not watched:
            return step(0)
        with tt.watch(scene.watched(_), tt.probe("module.head:output", keep=[sneak]), to=path):
            return step(0)

    scene = Ddp(path)
    return {"bare": collectives(lambda: run(False))[1], "tapped": collectives(lambda: run(True))[1]}


def chosen(path: Path) -> Any:
    """One rank records; the other's tap does nothing, and works."""
    model, step = Ddp(path).build()
    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
    with tt.watch(model, to=path, ranks=1) as tap:
        after = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()}
        for number in range(2):
            step(number)
            tt.tap(torch.ones(2), "named/value")
            tap.step(loss=0.5)
        with tap.span(request=1):
            pass
        tap.pause()
        tap.resume()
        tap.flush()
    dist.barrier()
    run = tap.run
    return {"ranks": run.ranks, "path": tap.path, "hooks": after != before, "steps": run.steps, "counts": tap.counts}


def agreed(path: Path) -> Any:
    """Nobody says where: all ranks find the same folder, and another one for the next watch."""
    path.mkdir(exist_ok=True)
    home = Path.cwd()
    os.chdir(path)
    try:
        found = []
        for _ in range(2):
            model = nn.Linear(2, 2)
            with tt.watch(model) as tap:
                model(torch.ones(1, 2))
            found.append(tap.path)
        with tt.watch(model, ranks=0) as tap:
            model(torch.ones(1, 2))
        dist.barrier()
        found.append(tap.run.path)
        return {"paths": found, "ranks": [tt.open(p).ranks for p in found]}
    finally:
        os.chdir(home)


def uneven(path: Path) -> Any:
    """One rank has more batches than the other."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, to=path), model.join():
        for _ in range(2 + dist.get_rank()):
            model(torch.randn(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {}


def shared(path: Path) -> Any:
    """Statistics of all ranks together, at the end of every second step."""
    scene = Ddp(path)
    model, step = scene.build()
    probes = [tt.probe("**:output", "**:param", when=tt.every(2))]
    found: list[Any] = []

    def run() -> None:
        with tt.watch(model, *probes, to=path, global_stats=True) as tap:
            for number in range(3):
                step(number)
                if dist.get_rank() == 1 and number == 1:
                    tap.pause()  # it takes part with nothing from now on
                tap.step()
                now = tap.global_stats
                assert now is not None
                found.append({"step": now.step, "rows": {name: dict(row) for name, row in now.items()}})

    calls = collectives(run)[1]
    return {"found": found, "calls": calls}


def apart(path: Path) -> Any:
    """A bit of rank 1's weight flips after the second step; hashes go with the one all-reduce of each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    hashes = tt.probe("**:param", keep=[tt.stats(), tt.hash()])
    detail = tt.probe("**", keep=tt.stats(), when=tt.desync())

    def run() -> None:
        with tt.watch(model, hashes, detail, to=path, global_stats=True, lookback=1) as tap:
            for number in range(4):
                model(torch.ones(2, 4))
                tap.step()
                if dist.get_rank() == 1 and number == 1:
                    model[1].weight.data.view(torch.int32)[1, 2] ^= 1

    return {"calls": collectives(run)[1]}


def refused(path: Path) -> Any:
    """Ranks that watch different places do not begin to share."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    try:
        tt.watch(model, "0" if dist.get_rank() else "*", to=path, global_stats=True)
    except ProbeError as error:
        return {"said": str(error)}
    return {"said": ""}


class Log(nn.Module):
    """A logarithm, which is not defined everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x.log()


def nan(path: Path) -> Any:
    """Rank 1 makes a NaN; the reduced gradients carry it to all."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), Log(), nn.Linear(4, 1)))
    with torch.no_grad():
        model.module[0].weight.copy_(torch.eye(4))
        model.module[0].bias.fill_(2.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    told: list[str] = []
    with tt.watch(model, "**:output", "**:grad", to=path, on_nonfinite=lambda o: told.append(str(o.site))) as tap:
        for number in range(3):
            bad = number == 1 and dist.get_rank() == 1
            model(torch.full((2, 4), -3.0 if bad else 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    lead = next(f for f in tap.run.findings() if f.rule == "nonfinite")
    return {
        "site": lead.site,
        "where": {k: lead.evidence[k] for k in ("step", "rank")},
        "text": str(lead),
        "told": told,
    }


def dtensors(path: Path) -> Any:
    """Without gradients, and with a NaN in a DTensor on one rank: still nobody is asked for anything."""
    scene = Tensors(path)
    told: list[Any] = []
    counts: dict[str, int] = {}

    def run(watched: bool) -> str:
        torch.manual_seed(0)
        model = scene.parallel(Net(), scene.mesh())
        with torch.no_grad():
            if dist.get_rank() == 1:
                model.blocks[1].fc1.weight.to_local()[0, 0] = float("nan")
            if not watched:
                return str(model(scene.same_batch(0)).shape)
            with tt.watch(model, "**:output", to=path, strict=True, on_nonfinite=told.append) as tap:
                shape = str(model(scene.same_batch(0)).shape)
            counts.update(tap.counts)
            return shape

    bare, tapped = (collectives(lambda watched=watched: run(watched))[1] for watched in (False, True))
    origins = [(origin.site, origin.operation, origin.why) for origin in told]
    return {"bare": bare, "tapped": tapped, "origins": origins, "counts": counts}


def evaluated(path: Path) -> Any:
    """After a forward alone FSDP2 may leave whole parameters in the place of shards."""
    model = Fsdp(path).model()
    with torch.no_grad(), tt.watch(model, "**:param", to=path, strict=True) as tap:
        model(torch.ones(2, 5))
        tap.step()
    return {"whole": type(model.embed.weight).__name__}


class Fork(nn.Module):
    """Its input is used twice, by layers that lay their gradients out alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A sum."""
        total: Tensor = self.a(x) + self.b(x)
        return total


def forked(path: Path) -> Any:
    """The gradient of an input that is a DTensor and used twice is added up without communication."""
    mesh = Tensors(path).mesh()

    def run(watched: bool) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Fork())
        style = {"1.a": ColwiseParallel(use_local_output=False), "1.b": ColwiseParallel(use_local_output=False)}
        parallelize_module(model, mesh, style)
        x = DTensor.from_local(torch.ones(2, 4, requires_grad=True), mesh, run_check=False)
        fork = model[1]
        if not watched:
            fork(x).to_local().sum().backward()
            return digest(model)
        with tt.watch(fork, "**:grad_input", "**:grad_output", "**:input", to=path, strict=True):
            fork(x).to_local().sum().backward()
        return digest(model)

    (bare, plain), (tapped, watched) = collectives(lambda: run(False)), collectives(lambda: run(True))
    return {"same": bare == tapped, "bare": plain, "tapped": watched}


def local_parts(path: Path) -> Any:
    """DistributedDataParallel over tensor-parallel layers holds local parameters; modules compute with DTensors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    scene = Tensors(path)
    torch.manual_seed(0)
    inner: Any = scene.parallel(Net(), mesh["tp"])
    _pre_dp_module_transform(inner)
    model = DistributedDataParallel(inner, process_group=mesh["dp"].get_group())
    weight = inner.blocks[0].fc1.weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tt.watch(model, "**:param", "**:grad", "**:update", to=path, strict=True) as tap:
        for number in range(2):
            model(scene.same_batch(number)).square().mean().backward()
            optimizer.step()
            sizes = [float(weight.grad.norm()), float(weight.detach().norm())]
            optimizer.zero_grad()
            tap.step()
    return {"gradient and weight": sizes, "kept": type(inner.blocks[0].fc1.weight).__name__}


SMALL = {
    "planted": planted, "chosen": chosen, "agreed": agreed, "uneven": uneven, "shared": shared, "apart": apart,
    "refused": refused,
    "nan": nan, "dtensors": dtensors, "forked": forked, "evaluated": evaluated,
}  # fmt: skip
