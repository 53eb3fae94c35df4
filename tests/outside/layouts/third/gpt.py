"""A GPT with a tied head under DistributedDataParallel, FSDP2, or all-reduce by hand, with a DistributedSampler."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from outside.layouts.third.scene import ROWS, Loop, Scene, average_gradients, begin, generator

VOCAB, WIDTH, LENGTH, HEADS = 40, 24, 12, 3


class Attention(nn.Module):
    """Fused queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """Before each, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's names."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(VOCAB, WIDTH), "wpe": nn.Embedding(LENGTH, WIDTH),
             "h": nn.ModuleList(Block() for _ in range(layers)), "ln_f": nn.LayerNorm(WIDTH)}
        )  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1])
        x = self.transformer.wte(tokens) + self.transformer.wpe(at)
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class WithAverage(nn.Module):
    """A model and its moving average."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def batches(scene: Scene) -> Any:
    """Return a function from a step to this rank's tokens: two steps are an epoch, shuffled anew for each."""
    data = TensorDataset(torch.randint(0, VOCAB, (2 * ROWS, LENGTH + 1), generator=generator(3)))
    replicas, rank = scene.world, scene.rank
    if scene.fault == "same shard":
        rank = 0
    sampler: Any = DistributedSampler(data, replicas, rank, shuffle=scene.has("shuffle"), seed=1)

    def tokens(step: int) -> Tensor:
        if scene.fault != "no set_epoch" or scene.rank != 1:
            sampler.set_epoch(step // 2)
        return list(DataLoader(data, ROWS // replicas, sampler=sampler))[step % 2][0]

    return tokens


def train(scene: Scene) -> Loop:
    """Set up the training."""
    if scene.fault == "seed of rank":
        torch.manual_seed(scene.rank)
        model: Any = GPT().to(scene.dtype)
    else:
        model = begin(scene, GPT)
    if scene.fault == "stale load" and scene.rank == 1:
        model.transformer.h[1].mlp.c_fc.bias.data.add_(0.01)
    core, watched = model, None
    if scene.has("ema"):
        watched = WithAverage(core)
    if scene.layout == "ddp":
        model = DistributedDataParallel(model)
        if scene.fault == "bf16 hook":
            model.register_comm_hook(None, _bf16)
    elif scene.layout == "fsdp":
        for block in core.transformer.h:
            fully_shard(block)
        fully_shard(core)
    rate = 0.01
    if scene.fault == "rate of rank" and scene.rank == scene.world - 1:
        rate *= scene.world
    wd = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    if scene.fault == "frozen on rank" and scene.rank == 1:
        rest = [p for p in rest if p is not core.transformer.ln_f.bias]
    if scene.has("sgd"):
        optimizer: Any = torch.optim.SGD([{"params": wd}, {"params": rest}], 10 * rate, momentum=0.9)
    else:
        groups = [{"params": wd, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, rate, fused=scene.has("fused"), foreach=scene.has("foreach") or None)
    tokens = batches(scene)
    micro = 2 if scene.has("accumulate") and scene.world > 1 else 1

    def loss_of(logits: Tensor, targets: Tensor, count: Any) -> Tensor:
        if not scene.has("masked") or scene.fault == "mean of rank":
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)
        total = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")
        return total * scene.world * micro / count

    def step(number: int) -> None:
        batch = tokens(number)
        x, y = batch[:, :-1], batch[:, 1:].clone()
        if scene.has("masked"):
            y[x[:, :1].expand_as(y) % 2 == 0] = -100
            y[:, 0] = x[:, 0]
        count = (y != -100).sum()
        if scene.world > 1:
            dist.all_reduce(count)
        for n, (xs, ys) in enumerate(zip(x.chunk(micro), y.chunk(micro), strict=True)):
            last = n == micro - 1
            if scene.fault == "boundary":
                last = n == 0
            apart = scene.layout == "ddp" and not last
            with model.no_sync() if apart else contextlib.nullcontext():
                if scene.layout == "fsdp":
                    model.set_requires_gradient_sync(last)
                with torch.autocast("cpu", torch.bfloat16, enabled=scene.has("autocast")):
                    logits = model(xs)
                (loss_of(logits, ys, count) / micro).backward()
        if scene.layout == "hand":
            average_gradients(model, skip=lambda name: scene.fault == "position skipped" and "wpe" in name)
            if scene.fault == "divided twice":
                for p in model.parameters():
                    p.grad /= scene.world
        if scene.has("clip"):
            clip(scene, model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scene.has("ema") and (scene.rank == 0 or scene.fault != "ema of rank 0"):
            assert watched is not None
            watched.ema.update_parameters(core)
        if scene.fault == "bit" and number == 1 and scene.rank == scene.world - 1:
            core.transformer.h[0].attn.c_proj.weight.data.view(torch.int32)[3, 5] ^= 1 << 4
        if scene.fault == "stale offload" and scene.rank == 0 and number == 0:
            core.transformer.h[1].ln_2.weight.data.fill_(1.0)

    return Loop(watched if watched is not None else core if scene.has("inner") else model, step)


def clip(scene: Scene, model: nn.Module) -> None:
    """By the norm of all gradients."""
    if scene.fault != "local norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        return
    gradients = [p.grad.to_local() for p in model.parameters()]  # type: ignore[union-attr]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    for gradient in gradients:
        gradient.mul_(torch.clamp(0.3 / (norm + 1e-6), max=1.0))


def _bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    low = (bucket.buffer() / dist.get_world_size()).bfloat16()
    return dist.all_reduce(low, async_op=True).get_future().then(lambda done: bucket.buffer().copy_(low))  # type: ignore[union-attr]
