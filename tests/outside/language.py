"""Every architecture of transformers that builds from a shrunken configuration."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from outside.checks import Subject
from outside.packages import NotBuildableError, load_torchvision

MOST_PARAMETERS = 20_000_000
# What configurations call their sizes, and what they become; whatever else they say stays.
SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "decoder_hidden_size",
                     "hidden_dim", "encoder_hidden_size", "projection_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner",
                     "moe_intermediate_size", "feed_forward_proj_dim", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers",
                     "num_decoder_layers", "num_encoder_layers", "n_layers", "depth"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "d_kv", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("vocab_size",), 120),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("image_size",), 32),
    **dict.fromkeys(("patch_size",), 8),
}  # fmt: skip
SPECIAL_TOKENS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "image_token_id",
    "sep_token_id",
)


def subjects() -> Iterator[Subject]:
    """One subject for every architecture with a model of its own; building it is left to the check."""
    load_torchvision()  # transformers imports it where it is installed
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    for kind in sorted(CONFIG_MAPPING_NAMES):
        if kind in MODEL_MAPPING_NAMES:
            yield Subject(f"transformers/{kind}", _maker(kind))


def _maker(kind: str) -> Any:
    known: dict[str, Any] = {}  # the inputs that the model took, found by trying once

    def make() -> tuple[nn.Module, Any]:
        model = _model(kind)
        if "batch" not in known:
            known["batch"] = _inputs(model)
        return model, known["batch"]

    return make


def _model(kind: str) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.for_model(kind)
            shrink(config)
            torch.manual_seed(0)
            model: nn.Module = AutoModel.from_config(config)
    except Exception as error:
        raise NotBuildableError(f"{type(error).__name__}: {error}") from error
    if sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
        raise NotBuildableError("more than 20 million parameters after shrinking")
    return model


def shrink(config: Any, depth: int = 0) -> None:
    """Make every size that has a known name small, also in nested configurations."""
    for name, size in SMALL.items():
        if isinstance(getattr(config, name, None), int) and not isinstance(getattr(config, name), bool):
            _set(config, name, min(size, getattr(config, name)))
    for name in SPECIAL_TOKENS:
        if isinstance(getattr(config, name, None), int):
            _set(config, name, min(getattr(config, name), 3))
    if isinstance(getattr(config, "layer_types", None), list):
        kinds = list(dict.fromkeys(config.layer_types))  # one layer of each kind, where there are several
        layers = max(2, len(kinds))
        _set(config, "num_hidden_layers", layers)
        _set(config, "layer_types", (kinds * layers)[:layers])
    for value in list(vars(config).values()):
        if depth < 3 and hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, depth + 1)


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:
        return  # some names are computed from others


def _inputs(model: nn.Module) -> dict[str, Any]:
    """Try what models take until one call succeeds."""
    first: Exception | None = None
    for batch in _candidates(model):
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                model.eval()(**batch)
        except Exception as error:
            first = first or error
        else:
            return batch
    raise NotBuildableError(f"no input that it takes was found: {type(first).__name__}: {first}")


def _candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    names = set(inspect.signature(model.forward).parameters)
    torch.manual_seed(1)
    ids = torch.randint(4, 100, (2, 10))
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config: Any = model.config
    sizes = [s for s in (_of(config, "image_size"), 32, 64, 224) if isinstance(s, int)]
    channels = _of(config, "num_channels") or 3
    mels = _of(config, "num_mel_bins") or 80
    offers = [
        text, {**text, "decoder_input_ids": ids}, {"input_ids": ids},
        *({"pixel_values": torch.randn(2, channels, s, s)} for s in sizes),
        *({"pixel_values": torch.randn(2, channels, s, s), **text} for s in sizes),
        *({"pixel_values": torch.randn(2, 4, channels, s, s)} for s in sizes),
        *({"pixel_values_videos": torch.randn(1, 4, channels, s, s)} for s in sizes),
        {"input_values": torch.randn(2, 4000)}, {"input_values": torch.randn(2, 4000), "decoder_input_ids": ids},
        {"input_features": torch.randn(2, mels, 128), "decoder_input_ids": ids},
        {"input_features": torch.randn(2, 50, mels)}, {"input_features": torch.randn(2, mels, 128)},
        {"input_features": torch.randn(2, 50, mels), "decoder_input_ids": ids},
        {"inputs": torch.randn(2, 20, 32)}, {"hidden_states": torch.randn(2, 10, 32)},
    ]  # fmt: skip
    yield from (offer for offer in offers if set(offer) <= names or "kwargs" in names)


def _of(config: Any, name: str) -> Any:
    for holder in (config, getattr(config, "vision_config", None), getattr(config, "audio_config", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int):
            return value
    return None
