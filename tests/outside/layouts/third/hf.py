"""Tiny models of transformers: Llama, GPT-2 and BERT, as a Trainer-like loop would spread them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from outside.layouts.third.scene import ROWS, Loop, Scene, begin, generator, mesh, share

VOCAB, LENGTH = 48, 10


def llama() -> nn.Module:
    """Grouped queries, tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True))  # fmt: skip


def bert() -> nn.Module:
    """Without dropout."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))  # fmt: skip


def gpt2() -> nn.Module:
    """Conv1D layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))  # fmt: skip


MODELS = {"llama": llama, "bert": bert, "gpt2": gpt2}


def blocks(model: Any) -> list[nn.Module]:
    """What FSDP wraps by itself."""
    names = ("LlamaDecoderLayer", "BertLayer", "GPT2Block")
    return [module for module in model.modules() if type(module).__name__ in names]


def plan() -> dict[str, Any]:
    """Llama's layers over tensor-parallel ranks."""
    known: dict[str, Any] = {}
    for i in range(2):
        layer = f"model.layers.{i}"
        known |= {f"{layer}.self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        known |= {f"{layer}.mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        known |= {f"{layer}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return known


def train(scene: Scene) -> Loop:
    """Set up the training."""
    model: Any = begin(scene, MODELS[scene.model])
    model.train()
    dp, data_rank = scene.world, scene.rank
    if scene.fault == "stale load" and scene.rank == 1:
        torch.manual_seed(9)
        model.model.layers[1].mlp.down_proj.weight.data.normal_(0, 0.02)
    if scene.layout in ("tp", "ddp-tp", "fsdp-tp"):
        dp = 1 if scene.layout == "tp" else 2
        grid = mesh(("dp", dp), ("tp", scene.world // dp))
        data_rank = grid["dp"].get_local_rank()
        styles = plan()
        if scene.fault == "output not reduced":
            styles["model.layers.0.mlp.down_proj"] = _NotReduced()
        parallelize_module(model, grid["tp"], styles)
        if scene.layout == "fsdp-tp":
            for block in blocks(model):
                fully_shard(block, mesh=grid["dp"])
            fully_shard(model, mesh=grid["dp"])
    if scene.layout == "fsdp":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if scene.has("mixed") else MixedPrecisionPolicy()
        for block in blocks(model):
            fully_shard(block, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mp_policy=policy)
    if scene.layout == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=scene.model == "bert")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, weight_decay=0.01, fused=scene.has("fused"))
    if scene.has("sgd"):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    micro = 2 if scene.has("accumulate") and scene.world > 1 else 1

    def loss_of(inputs: dict[str, Tensor], items: int) -> Any:
        if scene.fault == "mean of micro-batch":
            return model(**inputs, use_cache=False).loss / micro
        return model(**inputs, use_cache=False, num_items_in_batch=items).loss * dp

    def step(number: int) -> None:
        ids = torch.randint(1, VOCAB, (ROWS, LENGTH), generator=generator(800 + number))
        labels = ids.clone()
        labels[torch.arange(ROWS) % 4 == 0, 3:] = -100
        ids, labels = share(ids, data_rank, dp), share(labels, data_rank, dp)
        if scene.fault == "same batch" and number == 2:
            ids, labels = torch.roll(ids, 1, 1), labels
        counted = labels if scene.model == "bert" else labels[:, 1:]
        items = (counted != -100).sum()
        if scene.world > 1 and dp > 1:
            dist.all_reduce(items)
            items //= scene.world // dp
        for n, (x, y) in enumerate(zip(ids.chunk(micro), labels.chunk(micro), strict=True)):
            last = n == micro - 1
            if scene.layout == "fsdp":
                model.set_requires_gradient_sync(last)
            apart = scene.layout == "ddp" and not last
            with model.no_sync() if apart else contextlib.nullcontext():
                with torch.autocast("cpu", torch.bfloat16, enabled=scene.has("autocast")):
                    inputs = {"input_ids": x, "labels": y, "attention_mask": torch.ones_like(x)}
                    loss = _bert_loss(model, inputs, items, dp) if scene.model == "bert" else loss_of(inputs, items)
                loss.backward()
        if scene.has("clip"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scene.fault == "rank skips" and scene.rank == 1 and number == 1:
            optimizer.zero_grad()
            return
        optimizer.step()
        optimizer.zero_grad()

    return Loop(model, step)


def _bert_loss(model: Any, inputs: dict[str, Tensor], items: Any, dp: int) -> Tensor:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    total = nn.functional.cross_entropy(logits.flatten(0, 1).float(), inputs["labels"].flatten(), reduction="sum")
    return total * dp / items


class _NotReduced(RowwiseParallel):
    """Takes its partial sum for the whole."""

    @staticmethod
    def _prepare_output_fn(output_layouts: Any, use_local_output: Any, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(outputs.to_local(), device_mesh, [Replicate()], run_check=False).to_local()
