"""Correct models that we did not design, for `tt.check_model`: none of them may raise a warning.

PYTHONPATH=src:tests python -m outside.checked_models [--architectures N] [NAME…]
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import tensortap as tt
from outside import language, zoo
from outside.packages import NotBuildableError

VOCABULARY, LENGTH, SAMPLES = 61, 9, 4
TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0,
       "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
      "pad_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0,
        "max_position_embeddings": 64, "decoder_start_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
        "forced_eos_token_id": 2}  # fmt: skip
KEY_VALUE = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 48, "num_labels": 5}  # fmt: skip


# Models of the zoo of which it is true: a memory of all samples, and a router that no gradient reaches.
TRUE = ("zoo/GrowingBuffer", "zoo/MixtureOfExperts")


class Case(NamedTuple):
    """A model and what `check_model` is told about it."""

    name: str
    make: Callable[[], tuple[nn.Module, Any, dict[str, Any]]]


def _tokens(mask: bool = True, padded: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH))
    batch = {"input_ids": ids}
    if mask:
        batch["attention_mask"] = torch.ones_like(ids)
    if padded:
        batch["attention_mask"][0, -2:] = 0
        ids[0, -2:] = 0
    return batch


def _hf(name: str, options: dict[str, Any], batch: Callable[[], dict[str, Any]]) -> Case:
    def make() -> tuple[nn.Module, Any, dict[str, Any]]:
        transformers = importlib.import_module("transformers")
        kind = getattr(transformers, name)
        torch.manual_seed(0)
        model = kind(kind.config_class(**options))
        return model, batch(), {}

    return Case(f"transformers/{name}", make)


def _lm() -> dict[str, Any]:
    batch = _tokens(padded=True)
    return batch | {"labels": torch.where(batch["attention_mask"] == 1, batch["input_ids"], -100)}


def _masked() -> dict[str, Any]:
    batch = _tokens(padded=True)
    chosen = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    chosen[:, 1::3] = True
    labels = torch.where(chosen & (batch["attention_mask"] == 1), batch["input_ids"], -100)
    batch["input_ids"][chosen] = 3
    return batch | {"labels": labels}


def _classes() -> dict[str, Any]:
    return _tokens(padded=True) | {"labels": torch.arange(SAMPLES) % 2}


def _tags() -> dict[str, Any]:
    return _tokens(padded=True) | {"labels": torch.randint(0, 2, (SAMPLES, LENGTH))}


def _answers() -> dict[str, Any]:
    return _tokens() | {"start_positions": torch.arange(SAMPLES), "end_positions": torch.arange(SAMPLES) + 3}


def _choices() -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (SAMPLES, 3, LENGTH))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(SAMPLES) % 3}


def _translation() -> dict[str, Any]:
    return _tokens(padded=True) | {"labels": torch.randint(3, VOCABULARY, (SAMPLES, LENGTH - 2))}


def _images() -> dict[str, Any]:
    return {"pixel_values": torch.randn(SAMPLES, 3, 16, 16), "labels": torch.arange(SAMPLES) % 5}


def _pairs() -> dict[str, Any]:
    return {**_tokens(), "pixel_values": torch.randn(SAMPLES, 3, 16, 16), "return_loss": True}


def _sound() -> dict[str, Any]:
    return {"input_values": torch.randn(SAMPLES, 800), "labels": torch.randint(1, 9, (SAMPLES, 2))}


CLIP = {"text_config": {**TEXT, "eos_token_id": 2, "bos_token_id": 1},
        "vision_config": {k: v for k, v in IMAGE.items() if k != "num_labels"}, "projection_dim": 16}  # fmt: skip
WAV2VEC = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
           "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
           "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 12,
           "mask_time_prob": 0.0, "pad_token_id": 0}  # fmt: skip
DISTIL = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "pad_token_id": 0,
          "max_position_embeddings": 64}  # fmt: skip
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}

TRANSFORMERS = [
    *(_hf(f"{name}ForCausalLM", KEY_VALUE, _lm) for name in (
        "Llama", "Mistral", "Qwen2", "Qwen3", "Phi", "Gemma", "Gemma2", "Cohere", "Olmo", "StableLm", "Starcoder2")),
    _hf("GPT2LMHeadModel", GPT, _lm),
    _hf("GPTNeoXForCausalLM", TEXT, _lm),
    _hf("OPTForCausalLM", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, _lm),
    _hf("MixtralForCausalLM", {**KEY_VALUE, "num_local_experts": 4, "num_experts_per_tok": 2}, _lm),
    _hf("MambaForCausalLM", MAMBA, lambda: {k: v for k, v in _lm().items() if k != "attention_mask"}),
    *(_hf(f"{name}ForMaskedLM", TEXT, _masked) for name in ("Bert", "Roberta", "Electra", "DebertaV2", "MPNet")),
    _hf("DistilBertForMaskedLM", DISTIL, _masked),
    _hf("AlbertForMaskedLM", {**TEXT, "embedding_size": 16}, _masked),
    *(_hf(f"{name}ForSequenceClassification", TEXT, _classes) for name in ("Bert", "Roberta", "Electra")),
    _hf("GPT2ForSequenceClassification", GPT, _classes),
    _hf("LlamaForSequenceClassification", KEY_VALUE, _classes),
    _hf("BertForTokenClassification", TEXT, _tags),
    _hf("BertForQuestionAnswering", TEXT, _answers),
    _hf("BertForMultipleChoice", TEXT, _choices),
    _hf("T5ForConditionalGeneration", T5, _translation),
    _hf("BartForConditionalGeneration", BART, _translation),
    _hf("MarianMTModel", BART, _translation),
    _hf("ViTForImageClassification", IMAGE, _images),
    _hf("DeiTForImageClassification", IMAGE, _images),
    _hf("BeitForImageClassification", IMAGE, _images),
    _hf("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
                                         "num_labels": 5}, _images),
    _hf("ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5,
                                           "patch_size": 4, "num_stages": 2}, _images),
    _hf("CLIPModel", CLIP, _pairs),
    _hf("Wav2Vec2ForCTC", WAV2VEC, _sound),
]  # fmt: skip


def _plain(name: str, model: Callable[[], nn.Module], batch: Callable[[], Any], **more: Any) -> Case:
    def make() -> tuple[nn.Module, Any, dict[str, Any]]:
        torch.manual_seed(0)
        return model(), batch(), more

    return Case(f"torch/{name}", make)


def _rows() -> torch.Tensor:
    return torch.randn(6, 5, 16)


TORCH = [
    _plain("Transformer", lambda: nn.Transformer(16, 2, 1, 1, 32),
           lambda: (torch.randn(7, 5, 16), torch.randn(6, 5, 16))),
    _plain("Transformer batch_first", lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True),
           lambda: (_rows(), torch.randn(6, 7, 16))),
    _plain("TransformerEncoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32), 2), _rows),
    _plain("TransformerEncoder batch_first", lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), _rows),
    _plain("TransformerEncoder masked", lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        lambda: {"src": _rows(), "src_key_padding_mask": torch.arange(5).expand(6, 5) > 3}),
    _plain("LSTM", lambda: nn.LSTM(16, 8), _rows),
    _plain("LSTM batch_first", lambda: nn.LSTM(16, 8, batch_first=True), _rows),
    _plain("GRU bidirectional", lambda: nn.GRU(16, 8, bidirectional=True, batch_first=True), _rows),
    _plain("MultiheadAttention", lambda: nn.MultiheadAttention(16, 4, batch_first=True), lambda: (_rows(),) * 3),
    _plain("BatchNorm", lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
           lambda: torch.randn(8, 16), target=torch.arange(8) % 3, loss=F.cross_entropy),
    _plain("SyncBatchNorm", lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))),
        lambda: torch.randn(8, 3, 8, 8), target=torch.arange(8) % 3, loss=F.cross_entropy),
    _plain("GroupNorm", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(),
                                              nn.Linear(288, 3)),
           lambda: torch.randn(8, 3, 8, 8), target=torch.arange(8) % 3, loss=F.cross_entropy),
    _plain("InstanceNorm", lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Flatten(),
                                                 nn.Linear(288, 1), nn.Flatten(0)),
           lambda: torch.randn(8, 3, 8, 8), target=torch.randn(8), loss=F.mse_loss),
    _plain("Bilinear", lambda: nn.Bilinear(8, 8, 4), lambda: (torch.randn(5, 8), torch.randn(5, 8))),
    _plain("EmbeddingBag", lambda: nn.EmbeddingBag(20, 8), lambda: torch.randint(0, 20, (4, 6))),
    _plain("AdaptiveLogSoftmax", lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5]),
           lambda: (torch.randn(4, 16), torch.randint(0, 20, (4,)))),
]  # fmt: skip


def zoo_cases() -> Iterator[Case]:
    """Every shape of model of the zoo."""
    for subject in zoo.subjects():
        yield Case(subject.name, lambda make=subject.make: (*make(), {}))


def architectures(most: int) -> Iterator[Case]:
    """Architectures of transformers, evenly spaced, without heads or losses."""
    found = list(language.subjects())
    for subject in found[:: max(1, len(found) // most)][:most]:
        yield Case(subject.name, lambda make=subject.make: (*make(), {}))


def alarms(case: Case) -> tuple[list[str], dict[str, str]]:
    """Return the warnings and errors that a correct model raises, and the checks that did not apply."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch, more = case.make()
        found = tt.check_model(model, batch, **more)
    return [str(finding) for finding in found.at_least("warning")], dict(found.skipped)


def main() -> int:
    """Print every alarm, and how many models there were."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--architectures", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    cases = [*TRANSFORMERS, *TORCH, *zoo_cases(), *(architectures(given.architectures) if given.architectures else ())]
    checked, wrong = 0, 0
    for case in cases:
        if given.names and not any(name in case.name for name in given.names):
            continue
        begun = time.monotonic()
        try:
            said, skipped = alarms(case)
        except NotBuildableError as error:
            print(f"{case.name}: not buildable: {error}"[:120])
            continue
        except Exception as error:
            print(f"{case.name}: RAISED {type(error).__name__}: {error}"[:300])
            wrong += 1
            continue
        checked += 1
        wrong += bool(said) and case.name not in TRUE
        print(f"{case.name}  {time.monotonic() - begun:.1f} s  {'; '.join(said) or 'no alarm'}", flush=True)
        if given.verbose:
            print(f"    {skipped}")
    print(f"{checked} models, {wrong} with a warning or an error")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
