"""Every architecture of transformers that builds from a shrunken configuration."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from outside.checks import Subject
from outside.packages import NotBuildableError, load_torchvision

MOST_PARAMETERS = 48_000_000
MOST_TRIES = 40  # calls, to find what a model takes
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
# Of these the shape of the model depends on the count alone.
COUNTS = {name: SMALL[name] for name in SMALL if name.startswith(("num_hidden_l", "n_layer", "num_layers")) or (
    "_layers" in name or name in ("vocab_size", "depth", "num_experts", "num_local_experts", "n_routed_experts",
                                  "num_experts_per_tok"))}  # fmt: skip
NOT_WIDTHS = ("token", "position", "image_size", "patch", "vocab", "rate", "window", "bins", "length", "kernel",
              "stride", "_id", "_mel", "theta", "frames", "chunk", "queries", "num_", "n_")  # fmt: skip
MAIN_INPUTS = ("input_ids", "pixel_values", "input_values", "input_features", "decoder_input_ids", "attention_mask",
               "bbox", "pixel_values_videos", "inputs", "inputs_embeds", "past_values", "states", "audio_values",
               "image_grid_thw")  # fmt: skip
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
    known: dict[str, Any] = {}  # how the model was shrunk and the inputs that it took, found by trying once

    def make() -> tuple[nn.Module, Any]:
        if not known:
            known["shrink"], known["batch"] = _fitting(kind)
        return _model(kind, known["shrink"]), known["batch"]

    return make


def _fitting(kind: str) -> tuple[Callable[[Any], None], Any]:
    """Return the first way of shrinking that gives a model of moderate size, with a batch that the model takes."""
    reasons = []
    for way in (shrink, partial(scale, factor=16), partial(scale, factor=8), partial(scale, factor=4), shorten):
        try:
            return way, _inputs(_model(kind, way))
        except NotBuildableError as error:
            reasons.append(str(error))
            if "requires the" in reasons[-1]:  # a library that is not here
                break
    raise NotBuildableError(next((r for r in reasons if not r.startswith("more than")), reasons[0]))


def _model(kind: str, way: Callable[[Any], None]) -> nn.Module:
    from transformers import AutoConfig, AutoModel

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.for_model(kind)
            way(config)
            if _size(copy.deepcopy(config)) > MOST_PARAMETERS:
                raise NotBuildableError(f"more than {MOST_PARAMETERS // 1_000_000} million parameters after shrinking")
            torch.manual_seed(0)
            model: nn.Module = AutoModel.from_config(config)
    except NotBuildableError:
        raise
    except Exception as error:
        raise NotBuildableError(f"{type(error).__name__}: {error}") from error
    return model


def _size(config: Any) -> int:
    """Return how many parameters a model has, without any memory for them; 0 where it cannot be made that way."""
    from transformers import AutoModel

    try:
        with torch.device("meta"):
            return sum(p.numel() for p in AutoModel.from_config(config).parameters())
    except Exception:
        return 0


def shrink(config: Any) -> None:
    """Make every size that has a known name small, also in nested configurations."""
    for each in _nested(config):
        heads, kv_heads = (getattr(each, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        for name, size in SMALL.items():
            if _is_size(each, name):
                _set(each, name, min(size, getattr(each, name)))
        if heads and heads == kv_heads:
            _set(each, "num_key_value_heads", each.num_attention_heads)
        _shorten(each)


def scale(config: Any, factor: int) -> None:
    """Divide every width by one factor, so that they go on fitting each other."""
    for each in _nested(config):
        for name, value in list(vars(each).items()):
            if not any(word in name for word in NOT_WIDTHS):
                _set(each, name, _divided(value, factor))
        _shorten(each)


def shorten(config: Any) -> None:
    """Make only what is counted small: layers, words, experts."""
    for each in _nested(config):
        _shorten(each)


def _shorten(config: Any) -> None:
    for name, size in COUNTS.items():
        if _is_size(config, name):
            _set(config, name, min(size, getattr(config, name)))
    for name in SPECIAL_TOKENS:
        if _is_size(config, name):
            _set(config, name, min(getattr(config, name), 3))
    if isinstance(getattr(config, "layer_types", None), list):
        kinds = list(dict.fromkeys(config.layer_types))  # one layer of each kind, where there are several
        layers = max(2, len(kinds))
        _set(config, "num_hidden_layers", layers)
        _set(config, "layer_types", (kinds * layers)[:layers])
    if isinstance(getattr(config, "depths", None), (list, tuple)):
        _set(config, "depths", [min(depth, 2) for depth in config.depths])


def _divided(value: Any, factor: int) -> Any:
    if isinstance(value, (list, tuple)) and value and all(type(item) is int and item >= 16 for item in value):
        return type(value)(max(8, item // factor) for item in value)
    wide = type(value) is int and value >= max(64, 4 * factor) and value % factor == 0
    return value // factor if wide else value


def _nested(config: Any, depth: int = 0) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if depth < 3 and hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _nested(value, depth + 1)


def _is_size(config: Any, name: str) -> bool:
    return type(getattr(config, name, None)) is int


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:
        return  # some names are computed from others


def _inputs(model: nn.Module) -> dict[str, Any]:
    """Try what models take until one call succeeds."""
    first: Exception | None = None
    for batch in itertools.islice(_candidates(model), MOST_TRIES):
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
    parameters = inspect.signature(model.forward).parameters
    taken = {name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    needed = {name for name in taken if parameters[name].default is inspect.Parameter.empty}
    torch.manual_seed(1)
    known = _values(model.config)
    main = [name for name in MAIN_INPUTS if name in taken]
    for names in ([], *([name] for name in main), *map(list, itertools.combinations(main, 2))):
        asked = sorted(needed | set(names))
        if asked and all(name in known for name in asked):
            for values in itertools.product(*(known[name] for name in asked)):
                yield dict(zip(asked, values, strict=True))


def _values(config: Any) -> dict[str, list[Any]]:
    """What models may mean by the names of their inputs: for each name some values to try."""
    ids = torch.randint(4, 100, (2, 10))
    channels, mels = _of(config, "num_channels") or 3, _of(config, "num_mel_bins") or 80
    width, patch = _of(config, "hidden_size") or 32, _of(config, "patch_size") or 8
    sides = list(dict.fromkeys(s for s in (_of(config, "image_size"), 32, 64, 224) if isinstance(s, int)))
    frames = _of(config, "num_frames") or 4
    positions = _of(config, "max_source_positions") or 64
    patches = channels * (_of(config, "temporal_patch_size") or 1) * patch * patch
    boxes = torch.tensor([10, 10, 50, 50]).repeat(2, 10, 1)
    grid = [torch.tensor([[1, 4, 4]])]
    past = (_of(config, "context_length") or 32) + 7
    return {
        "input_ids": [ids], "decoder_input_ids": [ids],
        "attention_mask": [torch.ones_like(ids)], "bbox": [boxes], "token_type_ids": [torch.zeros_like(ids)],
        "inputs_embeds": [torch.randn(2, 10, width)],
        "hidden_states": [torch.randn(2, 10, width), torch.randn(16, patches)],
        "query_embeds": [torch.randn(2, 8, width)], "inputs": [torch.randn(2, 20, _of(config, "d_model") or 32)],
        "pixel_values": [torch.randn(2, channels, s, s) for s in sides]
        + [torch.randn(2, frames, channels, s, s) for s in sides] + [torch.randn(16, patches)],
        "pixel_values_videos": [torch.randn(1, frames, channels, s, s) for s in sides],
        "input_values": [torch.randn(2, 4000), torch.randn(2, 1, 4000),
                         torch.randn(2, _of(config, "max_length") or 100, mels)],
        "input_features": [torch.randn(2, mels, 2 * positions), torch.randn(2, 50, mels), torch.randn(2, mels, 128),
                           torch.randn(2, 1, 1001, 64)],
        "grid_thw": grid, "image_grid_thw": grid, "audio_values": [torch.randn(2, 1, 4000)],
        "past_values": [torch.randn(2, past)], "past_time_features": [torch.randn(2, past, 0)],
        "past_observed_mask": [torch.ones(2, past)],
        "states": [torch.randn(2, 5, _of(config, "state_dim") or 17)],
        "actions": [torch.randn(2, 5, _of(config, "act_dim") or 4)], "rewards": [torch.randn(2, 5, 1)],
        "returns_to_go": [torch.randn(2, 5, 1)], "timesteps": [torch.arange(5).repeat(2, 1)],
    }  # fmt: skip


def _of(config: Any, name: str) -> Any:
    for holder in (config, getattr(config, "vision_config", None), getattr(config, "audio_config", None)):
        value = getattr(holder, name, None)
        if isinstance(value, int):
            return value
    return None
