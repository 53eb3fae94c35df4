"""Measure a harvest against the bare forward pass and against what people write today.

    python benchmarks/harvest.py                 everything
    python benchmarks/harvest.py write read      some of: formats, write, read, memory, processes, ray, saelens

Each contender runs between two bare forward passes and is compared with their mean, so that a busy machine slows both
alike; ratios are medians over rounds. CPU time counts all threads: it is what a harvest costs where no core is idle.
BATCHES, ROUNDS and MODEL in the environment say how many batches and rounds, and which model; TIMES="1" leaves the long
run of `processes` out. nnsight and SAELens take part where they can be imported (PYTHONPATH=<folder with them>).
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harvest_formats import formats
from harvest_table import Run, compare, warm_up
from models import Transformer
from torch import nn

import tensortap as tt

BATCHES, BATCH, LENGTH = int(os.environ.get("BATCHES", "24")), 16, 64
ROUNDS = int(os.environ.get("ROUNDS", "5"))
TIMES = [int(times) for times in os.environ.get("TIMES", "1 4").split()]  # how often `processes` repeats the batches


def minilm() -> nn.Module:
    """A BERT as large as all-MiniLM-L6-v2."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    return BertModel(BertConfig(**sizes)).eval()


def gpt() -> nn.Module:
    """Six layers, width 256."""
    torch.manual_seed(0)
    return Transformer().eval()


def batches(name: str, vocabulary: int = 5000) -> list[dict[str, torch.Tensor]]:
    """Batches of token ids under the name that the model's forward has for them."""
    ids = torch.randint(0, vocabulary, (BATCHES, BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{name: each} for each in ids]


SUBJECTS = {
    "MiniLM": (minilm, "input_ids", "encoder.layer.{}"),
    "GPT": (gpt, "tokens", "blocks.{}"),
}


def contenders(model: nn.Module, data: list[dict[str, torch.Tensor]], site: str) -> dict[str, Run]:
    """Everything that takes part, by name."""
    half, four = site.format(2), [site.format(i) for i in (1, 2, 4, 5)]

    def bare(to: Path) -> None:
        with torch.no_grad():
            for batch in data:
                model(**batch)

    def harvest(*paths: str, stop: Any = None) -> Run:
        sites = [f"{path}:output" for path in paths]
        return lambda to: tt.harvest(model, data, *sites, to=to, dtype="bf16", stop=stop, progress=False)

    def hook(to: Path) -> None:
        to.mkdir()
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(half).register_forward_hook(lambda m, a, out: seen.append(first(out)))
        with torch.no_grad():
            for n, batch in enumerate(data):
                seen.clear()
                model(**batch)
                torch.save(seen[0].to(torch.bfloat16).reshape(-1, seen[0].shape[-1]).clone(), to / f"{n}.pt")
        handle.remove()

    first_half = truncated(model)

    def half_alone(to: Path) -> None:
        with torch.no_grad():
            for batch in data:
                first_half(**batch)

    found = {
        "bare forward": bare,
        "bare, cut at half depth": half_alone,
        "harvest, 1 site": harvest(half),
        "harvest, 4 sites": harvest(*four),
        "harvest, half depth, stop": harvest(half, stop="auto"),
        "hook + torch.save": hook,
        "datasets.map + hook": lambda to: mapped(model, data, half, to),
    }
    if nnsight_works():
        found["nnsight trace + torch.save"] = lambda to: traced(model, data, half, to)
    return found


def truncated(model: nn.Module) -> nn.Module:
    """The model without what comes after its third layer: what leaving a forward pass early can give at best."""
    short = copy.deepcopy(model)
    if isinstance(short, Transformer):
        short.blocks, short.norm, short.head = short.blocks[:3], nn.Identity(), nn.Identity()
    else:
        short.encoder.layer, short.pooler = short.encoder.layer[:3], None
    return short


def first(out: Any) -> torch.Tensor:
    """The hidden state in what a layer returns."""
    return out if isinstance(out, torch.Tensor) else out[0]


def mapped(model: nn.Module, data: list[dict[str, torch.Tensor]], path: str, to: Path) -> None:
    """What `datasets.map` makes of it: a column of lists."""
    import datasets

    datasets.disable_progress_bars()
    name = next(iter(data[0]))
    rows = datasets.Dataset.from_dict({name: torch.cat([batch[name] for batch in data]).tolist()})
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(path).register_forward_hook(lambda m, a, out: seen.append(first(out)))

    def run(batch: dict[str, Any]) -> dict[str, Any]:
        seen.clear()
        with torch.no_grad():
            model(**{name: torch.tensor(batch[name])})
        return {"values": seen[0].half().numpy()}

    rows.map(run, batched=True, batch_size=BATCH, cache_file_name=str(to) + ".arrow")
    handle.remove()


def nnsight_works() -> bool:
    """Whether nnsight can be imported here."""
    try:
        import nnsight  # noqa: F401
    except Exception as error:
        print(f"nnsight is left out: {type(error).__name__}: {str(error)[:80]}")
        return False
    return True


def traced(model: nn.Module, data: list[dict[str, torch.Tensor]], path: str, to: Path) -> None:
    """nnsight's trace around each batch."""
    from nnsight import NNsight

    to.mkdir()
    wrapped = NNsight(model)
    with torch.no_grad():
        for n, batch in enumerate(data):
            with wrapped.trace(**batch):
                hidden = wrapped.get(path).output.save()
            torch.save(first(hidden).to(torch.bfloat16).clone(), to / f"{n}.pt")


def write() -> None:
    """Throughput of writing, relative to the bare forward pass."""
    for name, (make, key, site) in SUBJECTS.items():
        if (chosen := os.environ.get("MODEL")) and chosen != name:
            continue
        model, data = make(), batches(key)
        print(f"\n{name}: {BATCHES} batches of {BATCH} × {LENGTH} tokens, bf16, median of {ROUNDS} rounds in turn")
        warm_up(contenders(model, data[:2], site))
        compare(contenders(model, data, site), ROUNDS, BATCHES * BATCH * LENGTH)


def saelens() -> None:
    """SAELens' cache of activations, which takes models of Hugging Face by their folder, beside ours of the same."""
    if importlib.util.find_spec("sae_lens") is None:
        print("SAELens is left out: it is not installed")
        return
    from datasets import Dataset, disable_progress_bars
    from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    disable_progress_bars()
    torch.manual_seed(0)
    data, count = batches("input_ids"), BATCHES * BATCH * LENGTH
    with tempfile.TemporaryDirectory() as folder:
        config = GPT2Config(n_embd=256, n_layer=6, n_head=8, vocab_size=5000, n_positions=LENGTH)
        GPT2LMHeadModel(config).save_pretrained(f"{folder}/gpt")
        words = Tokenizer(WordLevel({"<s>": 0, **{f"w{i}": i for i in range(1, 5000)}}, "<s>"))
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>").save_pretrained(
            f"{folder}/gpt"
        )
        rows = Dataset.from_dict({"input_ids": torch.cat([batch["input_ids"] for batch in data]).tolist()})
        model = GPT2LMHeadModel.from_pretrained(f"{folder}/gpt").eval()

        def bare(to: Path) -> None:
            with torch.no_grad():
                for batch in data:
                    model(**batch)

        def cache(to: Path) -> None:
            cfg = CacheActivationsRunnerConfig(
                dataset_path="", model_name=f"{folder}/gpt", model_class_name="AutoModelForCausalLM",
                model_batch_size=BATCH, hook_name="transformer.h.2", d_in=256, training_tokens=count,
                context_size=LENGTH, new_cached_activations_path=str(to), dtype="float32", buffer_size_gb=0.01,
                prepend_bos=False, streaming=False, device="cpu",
            )  # fmt: skip
            CacheActivationsRunner(cfg, override_dataset=rows).run()

        def harvest(stop: Any) -> Run:
            site = "transformer.h.2:output"
            return lambda to: tt.harvest(model, data, site, to=to, dtype="bf16", stop=stop, progress=False)

        print("\nHF GPT-2 of six layers, width 256, and SAELens' cache of it (float32: bf16 it does not write):")
        ours = {"harvest, 1 site": harvest(None), "harvest, 1 site, stop": harvest("auto")}
        compare({"bare forward": bare, **ours, "SAELens' cache": cache}, ROUNDS, count)


def a_harvest(to: Path, megabytes: int, width: int = 384) -> tt.Harvest:
    """A harvest of so many megabytes, of random vectors."""
    rows = 8192
    count = max(1, megabytes * 1_000_000 // (rows * width * 2))
    source = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    data = (torch.from_numpy(source).reshape(64, 128, width) for _ in range(count))
    return tt.harvest(nn.Identity(), data, ":output", to=to, dtype="bf16", progress=False)


def read() -> None:
    """Shuffled and sequential reading from the page cache."""
    with tempfile.TemporaryDirectory() as folder:
        acts = a_harvest(Path(folder) / "acts", 600)
        payload = acts.rows * 384 * 2 / 1e6
        times: dict[str, list[float]] = {"sequential": [], "shuffled": []}
        for _ in range(ROUNDS + 1):
            for name, seed in (("sequential", None), ("shuffled", 0)):
                begun = time.perf_counter()
                count = sum(len(batch) for batch in acts.batches(4096, seed=seed))
                times[name].append(time.perf_counter() - begun)
                assert count == acts.rows
        print(f"\nreading {payload:,.0f} MB of bf16 in batches of 4096 from the page cache, memory 256 MB")
        for name, seconds in times.items():
            print(f"  {name:<12} {payload / statistics.median(seconds[1:]):>8,.0f} MB/s")
        ratios = [a / b for a, b in zip(times["sequential"][1:], times["shuffled"][1:], strict=True)]
        runs = " ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"  shuffled is {statistics.median(ratios):.2f} of sequential ({runs})")


def memory() -> None:
    """The memory of this process, over a run of writing and of reading."""
    with tempfile.TemporaryDirectory() as folder:
        base, samples = resident(), []
        source = torch.randn(64, 128, 384)

        def data() -> Any:
            for n in range(120):
                if n % 12 == 0:
                    samples.append(resident() - base)
                yield source

        acts = tt.harvest(nn.Identity(), data, ":output", to=Path(folder) / "acts", dtype="bf16", progress=False)
        print(f"\nmemory over {acts.rows * 768 / 1e6:,.0f} MB written (MB above the start): {rounded(samples)}")
        base, samples = resident(), []
        for n, _ in enumerate(acts.batches(4096, seed=0)):
            if n % 24 == 0:
                samples.append(resident() - base)
        print(f"memory over the same read shuffled, memory=256MB:          {rounded(samples)}")
        print(f"peak of the whole process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB")


def resident() -> float:
    """Resident memory in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def rounded(numbers: list[float]) -> str:
    """Numbers for a line."""
    return " ".join(f"{number:.0f}" for number in numbers)


CHILD = """
import os, sys, time; sys.path.insert(0, {here!r})
import torch; torch.set_num_threads(1)
from harvest import minilm, batches
import tensortap as tt
model, data = minilm(), batches("input_ids") * {times}
rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open({mark!r}.format(rank), "w").close()
while not all(os.path.exists({mark!r}.format(other)) for other in range(count)):
    time.sleep(0.01)
calls = []
model.register_forward_pre_hook(lambda *of_call: calls.append(time.perf_counter()))
begun = time.perf_counter()
if {bare!r}:
    with torch.no_grad():
        for batch in data[rank::count]:
            model(**batch)
else:
    tt.harvest(model, data, "encoder.layer.2:output", to={to!r}, dtype="bf16", stop=None, progress=False,
               shard_size="1MB", spread=1)
print(time.perf_counter() - begun, len(calls), calls[0] - begun, calls[-1] - calls[0])
"""


class Together(NamedTuple):
    """What came of processes side by side."""

    seconds: float  # of the slowest, from the call to its return
    rate: float  # batches a second of all of them, from the first batch's beginning to the last one's
    before: float  # seconds until the last of them began its first batch
    batches: int  # that were run in all


def processes() -> None:
    """Two processes, as torchrun launches them, against one; each with one thread. The bare forward is the floor.

    The whole run has the start in it (loading what taps a model, the weights' fingerprint), which is the same however
    long the data is; the rate is that of the batches between.
    """
    for times in TIMES:
        print(f"\n{times * BATCHES} batches, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
        runs: dict[tuple[bool, int], list[Together]] = {(bare, n): [] for bare in (True, False) for n in (1, 2)}
        for _ in range(ROUNDS):  # in turn, so that a busy machine slows all alike
            for (bare, count), found in runs.items():
                found.append(together(count, bare, times))
        for bare, what in ((True, "the bare forward"), (False, "harvest")):
            one, two = runs[bare, 1], runs[bare, 2]
            show(f"{what}, in two processes", [a.seconds / b.seconds for a, b in zip(one, two, strict=True)])
            show(f"{what}, the rate of batches", [b.rate / a.rate for a, b in zip(one, two, strict=True)])
            starts = [statistics.median(run.before for run in found) for found in (one, two)]
            ran = [max(run.batches for run in found) for found in (one, two)]
            print(f"  first batch after {starts[0]:.2f} and {starts[1]:.2f} s, {ran[0]} and {ran[1]} batches run")


def show(what: str, ratios: list[float]) -> None:
    """Print the median of ratios, and all of them."""
    listed = " ".join(f"{ratio:.2f}" for ratio in ratios)
    print(f"{what:<36} {statistics.median(ratios):.2f} × one ({listed})", flush=True)


def together(count: int, bare: bool, times: int) -> Together:
    """Run as many processes at once, each with its share of the batches."""
    with tempfile.TemporaryDirectory() as folder:
        here = str(Path(__file__).parent)
        code = CHILD.format(here=here, to=f"{folder}/acts", mark=folder + "/mark{}", bare=bare, times=times)
        started = [
            subprocess.Popen(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(count)
        ]  # fmt: skip
        said = [[float(word) for word in child.communicate()[0].split()] for child in started]
        seconds, calls, before, between = zip(*said, strict=True)
        rate = sum((n - 1) / span for n, span in zip(calls, between, strict=True))
        return Together(max(seconds), rate, max(before), int(sum(calls)))


def ray() -> None:
    """What Ray adds: two workers with one thread each, against two processes of this machine, start-up apart."""
    import ray as engine

    os.environ["RAY_AUTH_MODE"] = "disabled"
    here = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    begun = time.perf_counter()
    engine.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": here})
    up = time.perf_counter() - begun
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"dtype": "bf16", "stop": None, "progress": False, "shard_size": "1MB", "spread": 1}
        site, data = "encoder.layer.2:output", batches("input_ids")
        begun = time.perf_counter()
        tt.harvest(minilm, data, site, to=f"{folder}/local", **options)
        local = time.perf_counter() - begun
        begun = time.perf_counter()
        tt.harvest(minilm, lambda: data, site, to=f"{folder}/ray", engine=tt.Ray(workers=1), **options)
        there = time.perf_counter() - begun
    print(f"\nRay: starts in {up:.1f} s; one worker takes {there:.1f} s where this process takes {local:.1f} s")


PARTS = {part.__name__: part for part in (formats, write, read, memory, processes, ray, saelens)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), metavar="PART", help="what to measure")
    chosen = parser.parse_args().parts or PARTS
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}")
    for part in chosen:
        PARTS[part]()
