"""A GPT of Megatron Core on one process and on two tensor-parallel ranks: `python -m outside.layouts.megatron OUT`.

From tests/, with megatron-core where Python finds it (`pip install --no-deps --target FOLDER megatron-core`). Records
what docs/layouts.md tells a user of Megatron to record, correct and with a fault, on CPU and gloo, and prints answers.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import run_ranks

import tensortap as tt

VOCABULARY, LENGTH, ROWS = 64, 8, 4


def build(ranks: int) -> Any:
    """Two layers with norms of queries and keys; parameters begin alike on any number of ranks."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, qk_layernorm=True,
        hidden_dropout=0.0, attention_dropout=0.0, tensor_model_parallel_size=ranks, use_cpu_initialization=True,
        bias_dropout_fusion=False, bias_activation_fusion=False, masked_softmax_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, perform_initialization=True,
    )  # fmt: skip
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(qk_layernorm=True)
    return GPTModel(config, spec, VOCABULARY, LENGTH, position_embedding_type="rope")


def without_gpu() -> None:
    """Let what asks for a GPU have the CPU; nothing is drawn, so that states of random numbers do not matter."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()


def train(to: Path, ranks: int, fault: bool) -> None:
    """Record three steps."""
    warnings.simplefilter("ignore")
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    without_gpu()
    model = build(ranks)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = tt.probe("**:input", "**:output", "**:grad_output", "**:grad_input", "**:param", "**:grad", "**:update",
                     keep=[tt.stats(), tt.full()])  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    at = torch.arange(LENGTH)[None].expand(ROWS, -1)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with tt.watch(model, probe, to=to) as tap:
        for _ in range(3):
            tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
            model(tokens[:, :-1], at, mask, labels=tokens[:, 1:]).mean().backward()
            for name, p in model.named_parameters():  # what finalize_model_grads does, which asks for a GPU
                if ranks > 1 and ("q_layernorm" in name or "k_layernorm" in name) and not fault:
                    dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            tap.step()


def main() -> None:
    """Record one process, two ranks, and two ranks that forget a reduction; print what is said of them."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    cases: dict[str, tuple[int, bool]] = {"one": (1, False), "tp2": (2, False), "tp2-fault": (2, True)}
    for name, (ranks, fault) in cases.items():
        codes = run_ranks(ranks, partial(train, out / name, ranks, fault), out)
        (out / f"meeting{ranks}").unlink(missing_ok=True)
        assert not any(codes), name
    for name in ("tp2", "tp2-fault"):
        found: Any = tt.diff(out / "one", out / name)
        print(f"{name}: {found.layouts}: {found.cause or f'the same in {found.pairs} pairs'}")


if __name__ == "__main__":
    main()
