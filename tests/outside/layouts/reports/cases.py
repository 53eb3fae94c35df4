"""Faults that users reported, and correct trainings in the same layouts. Answers were written before the first run.

What each fault follows is in its comment: repository and number of the report.
"""

from __future__ import annotations

from outside.layouts.third.cases import ALL, GRADIENT, Answer, Case, correct_cases, faulty

EXPERTS, HEADS = r".*\.experts\..*", r".*\.[qk]_norm\..*"
ROUTER = ("layers.1.moe", "layers.1.moe.router", "layers.1.moe.router.gate")


FAULTS = (
    # NVIDIA/Megatron-LM 1612: positions cut in blocks where tokens are cut head and tail
    faulty("context", "zigzag", 2, "positions in blocks", Answer(("forward",), "layers.0.attn.rope")),
    # axolotl-ai-cloud/axolotl 3608: ring attention across borders of packed documents
    faulty("context", "cp", 2, "documents not seen", Answer(("forward",), ("layers.0.attn", "layers.0.attn.core"))),
    # NVIDIA/Megatron-LM 3943: the loss of the second prediction divided by the context-parallel size once more
    faulty("context", "cp", 2, "second loss divided by ranks", Answer(("loss", "backward"), ("mtp", "mtp.head")),
           "ahead"),
    # ByteDance-Seed/VeOmni 1115: gradients reduced over a group that the sequence ranks are not in
    faulty("context", "ulysses", 2, "sequence ranks not reduced", Answer(GRADIENT, group=ALL)),
    # NVIDIA-NeMo/RL 3716, NVIDIA/Megatron-LM 816: norms of queries and keys not reduced over tensor-parallel ranks
    faulty("context", "tp", 2, "norms of heads not reduced", Answer(GRADIENT, group=HEADS), "shared keys"),
    # bigcode-project/Megatron-LM 37: one head of keys and values for all, its gradient each rank's own
    faulty("context", "tp", 2, "keys and values not reduced",
           Answer(("gradient", "backward"), ("layers.0.attn.kv", "layers.1.attn.kv")), "shared keys"),
    # NVIDIA/Megatron-LM 7452: logits of the whole vocabulary enter the cross-entropy of a part
    faulty("context", "tp", 2, "gathered logits", Answer(("loss",), ("head", "")), "shared keys"),
    # deepseek-ai/DeepSeek-V3 298: which tokens of the border belong to which part of the vocabulary
    faulty("context", "tp", 2, "border token twice", Answer(("forward",), "embed"), "shared keys"),
    # pytorch/pytorch 160285, databricks/megablocks 86: experts see the tokens of all ranks and are not scaled
    faulty("experts", "ep", 2, "experts not scaled", Answer(GRADIENT, group=EXPERTS)),
    # NVIDIA-NeMo/Automodel 2995: weights gathered without a gradient, so that only the balance trains the router
    faulty("experts", "ep", 2, "weights gathered without gradient", Answer(("backward", "gradient"), ROUTER)),
    # NVIDIA/Megatron-LM 5916: the norm that clips leaves out experts of other ranks
    faulty("experts", "ep", 2, "norm without other experts", Answer(("update", "gradient"), group=ALL), "clip"),
    # pytorch/torchtitan 1114: the bias that balances experts follows each rank's own tokens
    faulty("experts", "dp", 2, "balanced by own tokens", Answer(("buffer",), "layers.0.moe.router")),
    # pytorch/torchtitan 1593: tokens are counted again when activations are recomputed
    faulty("experts", "dp", 2, "counted twice", Answer(("buffer",), "layers.0.moe.router"), "recomputed"),
    # NVIDIA/Megatron-LM 5047: the auxiliary loss grows with the number of ranks
    faulty("experts", "ep", 2, "balance added over ranks", Answer(("backward", "loss"), ROUTER)),
    # NVIDIA/Megatron-LM 6260 (review): the tower's gradient divided by the ranks that had images
    faulty("towers", "hand", 2, "mean of ranks with images", Answer(GRADIENT, group=r"vision\..*"), "sgd"),
    # NVIDIA/Megatron-LM 5961: Muon on the rows that a rank holds of a matrix
    faulty("towers", "fsdp", 2, "orthogonal by shard",
           Answer(("update",), group=r"(embed|vision\.\d|blocks\.\d\.fc\d|head)\.weight"), "muon", "spread images"),
    # NVIDIA/Megatron-LM 950: a bucket of parameters arrives after the forward pass that needs it
    faulty("towers", "zero-hand", 2, "sent too late", Answer(("update",), "blocks.1.fc1", rank=0)),
    # pytorch/torchtitan 2972: a pipeline's loss is a sum, and divided by the tokens only where it is printed
    faulty("pipe", "1f1b", 2, "loss not divided", Answer(("loss",), ("output", ""))),
)  # fmt: skip

_BOTH = (
    ("context", "cp", 2, ()), ("context", "cp", 4, ("adamw",)), ("context", "zigzag", 2, ()),
    ("context", "zigzag", 4, ()), ("context", "ulysses", 2, ()), ("context", "ulysses", 4, ("adamw",)),
    ("context", "dp-cp", 4, ()), ("context", "cp", 2, ("ahead",)), ("context", "tp", 2, ("shared keys",)),
    ("context", "tp", 2, ("shared keys", "reduced by parameter")), ("context", "tp", 4, ("shared keys", "adamw")),
    ("towers", "hand", 2, ("sgd",)), ("towers", "ddp", 2, ()), ("towers", "ddp", 4, ("spread images",)),
    ("towers", "zero", 2, ()), ("towers", "zero-hand", 2, ()),
    ("towers", "zero-hand", 2, ("overlapped", "spread images")),
)  # fmt: skip
_FP32 = (  # which experts a token goes to is no continuous function, and Muon's of a small gradient none either
    ("experts", "dp", 2, ()), ("experts", "dp", 2, ("recomputed",)), ("experts", "ep", 2, ()),
    ("experts", "ep", 4, ("adamw",)), ("experts", "ep", 2, ("clip",)), ("experts", "ep", 2, ("recomputed",)),
    ("experts", "ep-dp", 4, ()), ("towers", "fsdp", 2, ("muon", "spread images")),
    ("towers", "hand", 2, ("muon", "spread images")),
)  # fmt: skip


def correct() -> list[Case]:
    """Every pair in fp32, and most in bf16."""
    return correct_cases(_BOTH, _FP32)
