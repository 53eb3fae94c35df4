"""Faults and correct trainings of the third set. Expected answers were written down before the first comparison.

Cases with `late=True` were compared for the first time after everything that the others showed was put right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from outside.layouts.reports import context, experts, towers
from outside.layouts.strangers import decoder, pairs
from outside.layouts.third import gpt, hf, mixer, moe, pipe, resnet, vit
from outside.layouts.third.scene import Loop, Scene

TRAIN: dict[str, Callable[[Scene], Loop]] = {
    "gpt": gpt.train, "vit": vit.train, "mixer": mixer.train, "moe": moe.train, "resnet": resnet.train,
    "llama": hf.train, "bert": hf.train, "gpt2": hf.train, "pipe": pipe.train,
    "context": context.train, "experts": experts.train, "towers": towers.train,
    "alibi": decoder.train, "pairs": pairs.train,
}  # fmt: skip
MESHES: dict[str, dict[str, int]] = {  # what docs/layouts.md asks for: where nothing in the run tells how ranks lie
    "dp-tp-hand": {"dp": 2, "tp": 2}, "dp-ep": {"dp": 2, "ep": 2}, "pp-dp": {"pp": 2, "dp": 2},
    "dp-cp": {"dp": 2, "cp": 2}, "ep-dp": {"dp": 2, "ep": 2},
}  # fmt: skip


class Answer(NamedTuple):
    """What a fault must be called: the stage, the module (or a pattern of all parameters that are wrong), the step."""

    kinds: tuple[str, ...]
    module: str | tuple[str, ...] = ()
    group: str = ""  # a regular expression of the names of parameters: these, all of these and no others
    step: int = 0
    rank: int | None = None
    by: str = "diff"


class Case(NamedTuple):
    """A training and what must be said of it; a correct one has no answer."""

    name: str
    scene: Scene
    answer: Answer | None = None
    late: bool = False


def faulty(
    model: str, layout: str, world: int, fault: str, answer: Answer, *options: str, late: bool = False
) -> Case:  # fmt: skip
    """Return a training with a fault, named by its layout and the fault."""
    scene = Scene(model, layout, world, options=options, fault=fault)
    return Case(f"{model} {layout}{world} {fault}", scene, answer, late)


GRADIENT, ALL = ("gradient",), ".*"
FAULTS = (
    # data, loops, optimizer
    faulty("gpt", "ddp", 2, "same shard", Answer(("input",), ""), "clip"),
    faulty("gpt", "ddp", 2, "no set_epoch", Answer(("input",), "", step=2), "shuffle", late=True),
    # both ranks have as many tokens in the first step: it acts in the second (the first answer written was step 0)
    faulty("gpt", "ddp", 2, "mean of rank", Answer(("loss",), ("lm_head", ""), step=1), "masked"),
    faulty("gpt", "ddp", 2, "boundary", Answer(GRADIENT, group=ALL), "accumulate", "sgd"),
    faulty("gpt", "ddp", 2, "bf16 hook", Answer(GRADIENT, group=ALL), "inner", late=True),
    faulty("gpt", "hand", 4, "divided twice", Answer(GRADIENT, group=ALL), late=True),
    faulty("gpt", "hand", 2, "position skipped", Answer(GRADIENT, "transformer.wpe"), "sgd"),
    faulty("gpt", "hand", 4, "rate of rank", Answer(("update",), group=ALL, rank=3)),
    faulty("gpt", "hand", 2, "frozen on rank", Answer(("update",), "transformer.ln_f", rank=1), late=True),
    faulty("gpt", "hand", 4, "stale load", Answer(("parameter",), "transformer.h.1.mlp.c_fc", rank=1)),
    # norms begin with the same ones and zeros whatever the seed (the first answer written was all parameters)
    faulty("gpt", "hand", 2, "seed of rank", Answer(("parameter",), group=r"(?!.*\.ln_).*", rank=1), late=True),
    faulty("gpt", "hand", 4, "bit", Answer((), "transformer.h.0.attn.c_proj", step=2, rank=3, by="replicas")),
    # the average is recorded when the step closes (the first answer written was step 1)
    faulty("gpt", "hand", 2, "ema of rank 0", Answer(("parameter", "buffer"), group=r"ema\..*", rank=1), "ema",
           late=True),
    faulty("gpt", "hand", 2, "stale offload", Answer(("parameter",), "transformer.h.1.ln_2", step=1, rank=0)),
    # a loop that clips by hand makes other gradients, not only other updates (the first answer written was update)
    faulty("gpt", "fsdp", 2, "local norm", Answer(("update", "gradient"), group=ALL), "clip", "sgd", late=True),
    faulty("vit", "fsdp-blocks", 2, "dropped", Answer(GRADIENT, group=r"(pos_embed|cls_token)")),
    faulty("vit", "fsdp-blocks", 2, "stale offload", Answer(("parameter",), "head", step=2, rank=None), "offload"),
    faulty("vit", "fsdp-root", 2, "reduced in bf16", Answer(GRADIENT, group=ALL), late=True),
    faulty("vit", "fsdp-fine", 2, "divide factor", Answer(GRADIENT, group=r"layers\.1\.(?!norm).*"), late=True),
    faulty("vit", "fsdp-blocks", 4, "rows of neighbour", Answer(("input",), "", step=1), late=True),
    faulty("vit", "ddp", 2, "rate not scheduled", Answer(("update",), group=ALL, step=1, rank=1)),
    # tensor, sequence and expert parallel
    faulty("mixer", "tp-hand", 2, "wrong dimension", Answer(("parameter",), "blocks.1.channel_mix.fc1")),
    faulty("mixer", "tp-hand", 4, "bias on every rank", Answer(("parameter",), "blocks.0.token_mix.fc2"), late=True),
    faulty("mixer", "tp-hand", 2, "copy forgotten", Answer(("backward",), ("blocks.0.channel_mix",
           "blocks.0.channel_mix.fc1"))),
    faulty("mixer", "tp", 2, "same mask", Answer(("forward",), "blocks.0.channel_mix.drop"), late=True),
    faulty("mixer", "dp-tp-hand", 4, "norms over all ranks", Answer(GRADIENT, group=r".*\.norm1\..*")),
    faulty("mixer", "dp-tp-hand", 4, "rows by global rank", Answer(("input",), "", step=1), late=True),
    faulty("moe", "sp", 2, "gate not reduced", Answer(GRADIENT, group=r".*\.gate\..*")),
    faulty("moe", "sp", 2, "norm not reduced", Answer(GRADIENT, "layers.1.moe_norm"), "adamw", late=True),
    faulty("moe", "dp", 2, "jitter", Answer(("forward",), ("layers.1.moe", "layers.1.moe.gate"))),
    faulty("moe", "dp-ep", 4, "experts not averaged", Answer(GRADIENT, group=r".*\.experts\..*"), late=True),
    faulty("moe", "dp", 4, "expert skipped", Answer((), "layers.0.moe.experts.1.w2", step=2, rank=0, by="replicas")),
    # batch norm, transformers, pipelines
    faulty("resnet", "ddp", 2, "no sync", Answer(("forward",), "bn1")),
    faulty("resnet", "ddp", 2, "one not synced", Answer(("forward",), "layer1.0.bn2"), late=True),
    faulty("resnet", "ddp", 4, "unnormalised", Answer(("input",), "", step=1), "frozen statistics"),
    faulty("llama", "ddp", 2, "mean of micro-batch", Answer(("loss",), ("lm_head", "")), "accumulate"),
    faulty("llama", "tp", 2, "output not reduced", Answer(("forward",), "model.layers.0.mlp.down_proj"), late=True),
    faulty("llama", "hand", 2, "stale load", Answer(("parameter",), "model.layers.1.mlp.down_proj", rank=1)),
    faulty("gpt2", "ddp", 2, "same batch", Answer(("input",), "", step=2), "fused", late=True),
    faulty("pipe", "1f1b", 2, "offset", Answer(("forward",), "layers.3.rotary")),
    faulty("pipe", "interleaved", 2, "offset", Answer(("forward",), "layers.3.rotary"), late=True),
    faulty("pipe", "sequence", 2, "offset", Answer(("forward",), "layers.2.rotary")),
    faulty("pipe", "gpipe", 2, "tied not summed", Answer(GRADIENT, group=r"(tok_embeddings|output)\..*"), "tied"),
    faulty("pipe", "1f1b", 2, "micro-batches added", Answer(GRADIENT, group=ALL), late=True),
    faulty("pipe", "1f1b", 2, "stage not loaded", Answer(("parameter",), "layers.2.block.attn.c_attn")),
    faulty("pipe", "pp-dp", 4, "last stage divided twice", Answer(GRADIENT, group=r"(layers\.[23]|norm|output)\..*"),
           late=True),
)  # fmt: skip

_CORRECT = (
    ("gpt", "ddp", 2, ()), ("gpt", "ddp", 4, ("clip", "foreach")), ("gpt", "ddp", 2, ("accumulate", "shuffle")),
    ("gpt", "ddp", 2, ("masked", "inner")), ("gpt", "ddp", 2, ("autocast",)), ("gpt", "fsdp", 2, ("fused",)),
    ("gpt", "fsdp", 4, ("sgd", "clip")), ("gpt", "fsdp", 2, ("accumulate", "masked")), ("gpt", "hand", 2, ("ema",)),
    ("gpt", "hand", 4, ("sgd", "shuffle")), ("vit", "fsdp-blocks", 2, ()), ("vit", "fsdp-root", 2, ("adamw",)),
    ("vit", "fsdp-fine", 4, ("clip",)), ("vit", "fsdp-blocks", 2, ("offload",)), ("vit", "hsdp", 4, ("adamw", "clip")),
    ("vit", "ddp", 4, ("adamw",)), ("mixer", "tp", 2, ()), ("mixer", "tp", 4, ("adamw",)),
    ("mixer", "tp-hand", 2, ("adamw",)), ("mixer", "tp-hand", 4, ()),
    ("mixer", "ddp-tp", 4, ()), ("mixer", "fsdp-tp", 4, ("adamw",)), ("mixer", "dp-tp-hand", 4, ()),
    ("mixer", "ddp-tp", 4, ("adamw",)), ("moe", "dp", 2, ("adamw",)), ("moe", "ep", 2, ()),
    ("moe", "ep", 4, ("adamw",)),
    ("moe", "sp", 2, ()), ("moe", "dp-ep", 4, ()), ("resnet", "ddp", 2, ()), ("resnet", "ddp", 4, ()),
    ("resnet", "ddp", 2, ("broadcast",)), ("resnet", "ddp", 2, ("frozen statistics",)), ("llama", "ddp", 2, ()),
    ("llama", "ddp", 2, ("accumulate", "clip")), ("llama", "fsdp", 2, ("fused",)), ("llama", "tp", 2, ()),
    ("llama", "fsdp-tp", 4, ()), ("llama", "ddp", 2, ("autocast",)), ("bert", "ddp", 2, ("sgd",)),
    ("bert", "fsdp", 2, ()), ("gpt2", "ddp", 2, ("accumulate",)), ("gpt2", "fsdp", 4, ("clip",)),
    ("pipe", "gpipe", 2, ()), ("pipe", "1f1b", 2, ("tied",)), ("pipe", "1f1b", 4, ("adamw",)),
    ("pipe", "interleaved", 2, ()), ("pipe", "pp-dp", 4, ()), ("pipe", "sequence", 2, ()),
    ("pipe", "sequence", 4, ("adamw",)),
)  # fmt: skip
_FP32_ONLY = (("moe", "dp", 2, ("top2",)), ("moe", "ep", 2, ("top2",)))
_MIXED = (("vit", "fsdp-blocks", 2, ("mixed",)), ("llama", "fsdp", 2, ("mixed",)))


def correct() -> list[Case]:
    """Every pair in fp32 and in bf16; every second one was kept for the end."""
    found = []
    for n, (model, layout, world, options) in enumerate(_CORRECT):
        for m, dtype in enumerate((torch.float32, torch.bfloat16)):
            if dtype == torch.bfloat16 and "autocast" in options:
                continue
            found.append(correct_case(model, layout, world, options, dtype, late=(n + m) % 2 == 1))
    found += [correct_case(*case, torch.float32, late=bool(n)) for n, case in enumerate(_FP32_ONLY)]
    return [*found, *(correct_case(*case, torch.float32, late=bool(n)) for n, case in enumerate(_MIXED))]


def correct_case(
    model: str, layout: str, world: int, options: tuple[str, ...], dtype: Any, *, late: bool = False
) -> Case:  # fmt: skip
    """Return a training without a fault, named by its layout, options and precision."""
    short = "bf16" if dtype == torch.bfloat16 else "fp32"
    scene = Scene(model, layout, world, dtype, options)
    return Case(" ".join((model, f"{layout}{world}", *options, short)), scene, None, late)


Layout = tuple[str, str, int, tuple[str, ...]]  # model, layout, ranks, options


def correct_cases(both: Iterable[Layout], fp32: Iterable[Layout]) -> list[Case]:
    """Return trainings without a fault: some in fp32 and bf16, some in fp32 only."""
    cases = [(*each, dtype) for each in both for dtype in (torch.float32, torch.bfloat16)]
    cases += [(*each, torch.float32) for each in fp32]
    return [correct_case(*case) for case in cases]
