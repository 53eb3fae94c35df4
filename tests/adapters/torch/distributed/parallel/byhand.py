"""What tests of ranks see without tensortap: collectives, parameters' bits, and tensors gathered by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tensortap as tt


def local(tensor: Any) -> Tensor:
    """What this rank holds."""
    held: Any = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return held


def digest(model: nn.Module) -> str:
    """The parameters' bits, as this rank holds them."""
    parts = b"".join(local(p.detach()).contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(parts).hexdigest()


def collectives(work: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What `work` gives, and every call of a process group while it ran, in order.

    The profiler sees calls where they are dispatched, and so those of C++ (DDP's reducer) as well as Python's.
    """
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        result = work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name().startswith("c10d::")]
    return result, [event.name() for event in sorted(events, key=lambda event: event.start_ns())]


class ByHand:
    """Hooks of the tests' own: what each leaf returned, and what parameters were when the optimizer stepped.

    `scene.share` says of an output whether ranks hold pieces of one tensor ("cat") or all the same ("same").
    """

    def __init__(self, model: nn.Module, scene: Any) -> None:
        self.model, self.share, self.prefix = model, scene.share, scene.prefix
        self._rehearsals, self.firsts = scene.rehearsals, scene.firsts
        self.step = 0
        self.whole: dict[str, Any] = {}
        self._seen: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(lambda m, a, out, name=scene.prefix + name: self._note(name, out))

    def parameters(self) -> None:
        """Before the optimizer's step: parameters and gradients, gathered where they are sharded."""
        for name, p in self.model.named_parameters():
            for port, tensor in (("param", p.detach()), ("grad", p.grad)):
                if tensor is not None:
                    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                    self._keep(f"{self.prefix}{name}:{port}", 0, whole)

    def close_step(self) -> None:
        """Gather the step's outputs and take the statistics of the whole."""
        for calls in self._seen.values() if not self.step else ():
            del calls[: self._rehearsals]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self._seen)
        for name in dict.fromkeys(name for seen in everyone for name in seen):
            holders = [seen[name] for seen in everyone if name in seen]
            for call in range(max(map(len, holders))):
                parts = [held[call] for held in holders if call < len(held)]
                parts = [parts[i] for i in self.firsts] if self.share(name) == "same" else parts
                self._keep(f"{name}:output", call, torch.cat([part.reshape(-1) for part in parts]))
        self._seen = {}
        self.step += 1

    def _note(self, name: str, output: Any) -> None:
        if torch._C._current_graph_task_id() == -1:  # not recomputed
            self._seen.setdefault(name, []).append(local(output).detach().clone())

    def _keep(self, place: str, call: int, tensor: Tensor) -> None:
        summary = dict(tt.summarize(tensor.contiguous()))
        summary["hist_counts"] = summary["hist_counts"].tolist()
        self.whole[f"{self.step} {place} {call}"] = summary


def train(scene: Any, *probes: Any, steps: int = 3) -> dict[str, Any]:
    """The same training three times: bare, tapped, and with hooks of our own that gather. What each showed."""

    def run(watched: bool) -> str:
        torch.manual_seed(0)
        model, step = scene.build()
        if not watched:
            for number in range(steps):
                step(number)
            return digest(model)
        with tt.watch(scene.watched(model), *probes, to=scene.path, strict=True):
            for number in range(steps):
                step(number)
        return digest(model)

    bare, plain = collectives(lambda: run(watched=False))
    tapped, watched = collectives(lambda: run(watched=True))
    torch.manual_seed(0)
    model, step = scene.build()
    hand = ByHand(model, scene)
    for number in range(steps):
        step(number, hand.parameters)
        hand.close_step()
    return {"bits": [bare, tapped], "collectives": plain, "with taps": watched, "whole": hand.whole}
