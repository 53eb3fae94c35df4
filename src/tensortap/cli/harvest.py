"""`tensortap harvest`: the activations of a data set, in a folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from tensortap.cli.options import json_option, overwrite_option, print_json
from tensortap.errors import HarvestError
from tensortap.harvest.keep import Keep, pooled, samples, tokens, top_k
from tensortap.harvest.ray_engine import Ray
from tensortap.harvest.run import harvest

_KEPT = "tokens, samples, mean, max, first, last or topk:N"


@click.command("harvest")
@click.argument("model", metavar="MODULE:FACTORY")
@click.argument("sites", nargs=-1, required=True, metavar="SITE...")
@click.option("--data", required=True, metavar="DATA",
              help="Parquet files, a folder of them, or MODULE:FACTORY that returns data.")  # fmt: skip
@click.option("--to", required=True, metavar="FOLDER", help="Where to write: a folder, or any fsspec URL.")
@click.option("--keep", default="tokens", show_default=True, metavar="WHAT", help=f"A row for each: {_KEPT}.")
@click.option("--mask", metavar="NAME", help="The batch's entry that masks padding, such as attention_mask.")
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="A random share of the tokens.")
@click.option("--dtype", metavar="TYPE", help="bf16, f16, f32 …; by default what the model computes in.")
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Samples in a batch, where data are samples.")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="NAME",
    help="An entry that the model is called with; of tuples its place, as 0.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="The seed of the order of rows.")
@click.option("--shard-size", default="32MB", show_default=True, help="The largest file.")
@click.option("--ray", type=click.IntRange(0), default=0, metavar="N", help="Use N workers of Ray.")
@click.option("--no-stop", is_flag=True, help="Run every forward pass to its end.")
@overwrite_option
@json_option
def command(model: str, sites: tuple[str, ...], **options: Any) -> None:
    """Run a model over a data set and keep the activations of some sites, each row once.

    The same command again continues where it stopped. Under torchrun its processes share the work:
    torchrun --nproc-per-node 8 -m tensortap harvest …
    """
    found = harvest(
        load(model), _data(options["data"]), *sites, to=options["to"],
        keep=_keep(options["keep"], options["mask"], options["share"], options["seed"]), dtype=options["dtype"],
        batch_size=options["batch_size"], inputs=[_place(name) for name in options["inputs"]] or None,
        seed=options["seed"], shard_size=options["shard_size"], engine=Ray(options["ray"]) if options["ray"] else None,
        stop=None if options["no_stop"] else "auto", overwrite=options["overwrite"],
    )  # fmt: skip
    if options["as_json"]:
        counts = {"rows": found.rows, "samples": found.samples, "complete": found.complete}
        print_json({"path": found.path, "sites": found.sites, "set_aside": found.set_aside, **counts})


def load(name: str) -> Callable[[], Any]:
    """Return what `module:attribute` names; modules in the working folder are found too."""
    module, colon, attribute = name.partition(":")
    if not colon or not attribute:
        raise HarvestError(f"{name!r} must be MODULE:FACTORY, such as my_models:make_gpt")
    if os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise HarvestError(f"{name!r} cannot be imported: {error}") from error
    return found  # type: ignore[no-any-return]


def _data(name: str) -> Any:
    is_import = ":" in name and "://" not in name and not os.path.exists(name)  # noqa: PTH110
    return load(name) if is_import else name


def _place(name: str) -> str | int:
    return int(name) if name.isdigit() else name


def _keep(name: str, mask: str | None, share: float, seed: int) -> Keep:
    word, _, number = name.partition(":")
    if share < 1.0 and word != "tokens":
        raise HarvestError(f"--share must be given with --keep tokens, got --keep {name}")
    if mask is not None and word == "samples":
        raise HarvestError("--mask must be given with what is kept of tokens, got --keep samples: write --keep mean")
    if word == "topk" and number.isdigit():
        return top_k(int(number), mask=mask)
    if word == "tokens":
        return tokens(mask, share=share, seed=seed)
    if word == "samples":
        return samples()
    if word in ("mean", "max", "first", "last"):
        return pooled(word, mask=mask)  # type: ignore[arg-type]  # one of the four
    raise HarvestError(f"--keep must be {_KEPT}, got {name!r}")
