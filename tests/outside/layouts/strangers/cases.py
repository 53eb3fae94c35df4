"""Faults of kinds that the other sets lack, and correct trainings. Answers were written before the first run.

What each fault follows is in its comment: repository and number of the report, where there is one.
"""

from __future__ import annotations

from outside.layouts.third.cases import ALL, GRADIENT, Answer, Case, correct_cases, faulty

ATTENTION = ("layers.0.attn", "layers.0.attn.core")
FEATURES = ("", "image", "image.2", "text", "text.out")


FAULTS = (
    # bigscience-workshop/Megatron-DeepSpeed 227: slopes of ALiBi are those of the first heads on every rank
    faulty("alibi", "tp", 2, "slopes by own heads", Answer(("forward",), ATTENTION)),
    # EleutherAI/gpt-neox 1424: a norm across heads takes the root mean square of a rank's own heads
    faulty("alibi", "tp", 2, "norm of own heads", Answer(("forward",), "layers.0.attn.q_norm")),
    # NVIDIA/Megatron-LM 737, 7464: labels are smoothed over a rank's part of the vocabulary
    faulty("alibi", "tp", 2, "smoothed over own part", Answer(("loss",), ("head", ""))),
    # the row of padding gets a gradient where the embedding is cut by vocabulary
    faulty("alibi", "tp", 4, "padding trained", Answer(GRADIENT, "embed")),
    # state-spaces/mamba 597, NVIDIA/Megatron-LM 5917: a convolution does not see the tokens of the rank before
    faulty("alibi", "cp", 2, "halo forgotten", Answer(("forward",), "layers.0.conv")),
    # huggingface/transformers 36607: labels are shifted after the sequence was cut
    faulty("alibi", "cp", 2, "labels shifted by rank", Answer(("loss",), ("head", ""))),
    # verl-project/verl 5070, ServiceNow/Fast-LLM 545: norms are decayed like matrices. Their biases begin with zeros,
    # of which nothing decays in the first step (the first answer written had biases too)
    faulty("alibi", "ddp", 2, "norms decayed", Answer(("update",), group=r".*norm.*\.weight"), "decay"),
    # huggingface/accelerate 2926: the schedule takes a step for every rank
    faulty("alibi", "dp", 2, "rate stepped by ranks", Answer(("update",), group=ALL, step=1), "decay", "schedule"),
    # pytorch/torchtitan 2881: FSDP2 casts what tells positions to bf16 at the border of a block
    faulty("alibi", "fsdp", 2, "positions cast", Answer(("forward",), ("layers.0", "layers.0.phase")), "mixed"),
    # buffers that no checkpoint has are empty after a model was made on the meta device
    faulty("alibi", "fsdp", 2, "frequencies lost", Answer(("forward",), "layers.0.phase")),
    # facebookresearch/SLIP 31: features of other ranks are gathered without a gradient
    faulty("pairs", "dp", 2, "gathered without gradient", Answer(("loss",), FEATURES)),
    # galilai-group/stable-pretraining 409: which texts belong to a rank's images
    faulty("pairs", "ddp", 2, "labels of rank 0", Answer(("loss",), FEATURES)),
)  # fmt: skip

_BOTH = (
    ("alibi", "tp", 2, ()), ("alibi", "tp", 4, ("adamw",)), ("alibi", "cp", 2, ()), ("alibi", "cp", 4, ("adamw",)),
    ("alibi", "dp", 2, ("decay", "schedule")), ("alibi", "dp", 2, ("uneven",)), ("alibi", "ddp", 4, ("decay",)),
    ("pairs", "dp", 2, ()), ("pairs", "ddp", 4, ()),
)  # fmt: skip
_FP32 = (
    ("alibi", "fsdp", 2, ("mixed",)), ("alibi", "fsdp", 2, ("decay",)), ("alibi", "fsdp", 2, ("uneven",)),
)  # fmt: skip


def correct() -> list[Case]:
    """Most pairs in fp32 and bf16."""
    return correct_cases(_BOTH, _FP32)
