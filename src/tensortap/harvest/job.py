"""A job: what one process needs to do any part of a harvest. It can be sent to a worker."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tensortap.adapters.lookup import framework_for
from tensortap.adapters.protocol import ForwardPass, Framework
from tensortap.adapters.registry import registered_for
from tensortap.errors import HarvestError
from tensortap.harvest.batch import TOKEN_IDS, InputBatch, Key, arrays_of_object
from tensortap.harvest.dtypes import NATIVE, cast
from tensortap.harvest.fingerprints import fingerprint_of_arrays
from tensortap.harvest.keep import Keep
from tensortap.harvest.rows import Array, KeptRows, mixed
from tensortap.harvest.sources import Collate, Source, source_of

SeeRows = Callable[[str, KeptRows], None]


@dataclass(frozen=True)
class Job:
    """The model or its factory, the data, the sites, and what is kept of them."""

    model: Any
    data: Any
    patterns: tuple[Any, ...]
    keep: Keep
    dtype: str | None
    batch_size: int | None = None
    collate: Collate | None = None
    inputs: tuple[Key, ...] | None = None
    token_ids: Key = TOKEN_IDS
    stop: bool = True
    seed: int = 0
    run_before: Mapping[int, Mapping[str, KeptRows]] = field(default_factory=dict)  # batches that need no second run
    left_out: tuple[str, ...] | None = None  # sites without a dimension for samples; None until there is a plan

    def source(self) -> Source:
        """Return the data as numbered batches."""
        return source_of(self.data, self.batch_size, self.collate)

    def made(self) -> Any:
        """Return the model; call the factory where one was given."""
        return self.model() if is_factory(self.model) else self.model


class TappedModel:
    """The model of this process. Its taps are put on when they are first needed, and taken off by `close`."""

    def __init__(self, job: Job) -> None:
        self.model = job.made()
        self.framework = framework_for(self.model)
        self._open = contextlib.ExitStack()
        self._run: ForwardPass | None = None

    def forward(self, job: Job) -> BatchForward:
        """Return what runs the batches of a job: of one harvest, as the taps stay where they are."""
        if self._run is None:
            passes = self.framework.forward_passes(self.model, job.patterns, job.stop)
            self._run = self._open.enter_context(passes)
        return BatchForward(job, self._run, self.framework, self.framework.parameters_of_call(self.model))

    def fingerprint(self) -> str:
        """Return a hash that tells other models from this, by its weights and its layers."""
        identity = self.framework.identity(self.model)
        head = f"{self.framework.capabilities.title} {type(self.model).__qualname__}\n{identity.layers}"
        return fingerprint_of_arrays(head, identity.arrays or arrays_of_object(self.model))

    def close(self) -> None:
        """Take the taps off, and leave the model as it was."""
        self._run = None
        self._open.close()


class KeepError(Exception):
    """An error of the user's `keep=` function, which is not the model's."""


class BatchForward:
    """Call the model with a batch and turn what comes by into rows."""

    def __init__(
        self, job: Job, run: ForwardPass, framework: Framework, parameters: frozenset[str] | None
    ) -> None:  # fmt: skip
        self._job = job
        self._run = run
        self._framework = framework
        self._parameters = parameters
        self.left_out: dict[str, tuple[int, ...]] = {}  # sites without a dimension for samples, with their shapes

    def __call__(self, batch: InputBatch, see: SeeRows) -> None:
        """Hand the kept rows of every site to a function."""

        def keep(site: str, values: Array) -> None:
            planned = self._job.left_out
            if planned is None and not has_samples(values, batch):
                self.left_out[site] = values.shape
            elif planned is None or site not in planned:
                see(site, self._rows(site, values, batch))

        with self._framework.seeded(self._seed(batch.number)):
            self._run(self._inputs(batch.inputs), keep)

    def _seed(self, number: int) -> int:
        """Return the seed of a batch: what a model draws must not depend on who runs it, nor on what ran before."""
        return int(mixed(self._job.seed, np.array([number]), np.array([0]))[0] >> np.uint64(1))

    def _rows(self, site: str, values: Array, batch: InputBatch) -> KeptRows:
        if not has_samples(values, batch):
            raise without_samples(site, values.shape, len(batch.samples))
        try:
            rows = self._job.keep.rows(values, batch, self._job.token_ids)
        except HarvestError as error:
            raise HarvestError(f"{site}: {error}") from error
        except (MemoryError, OSError):  # the machine's: no sample is to blame
            raise
        except Exception as error:
            raise KeepError(f"{type(error).__name__} at {site}: {error}") from error
        dtype = self._job.dtype or str(rows.values.dtype)
        if dtype not in NATIVE or rows.values.dtype.kind == "c":
            raise HarvestError(
                f"{site} has elements of {rows.values.dtype}, which a harvest cannot hold: give keep= a function that "
                "returns real numbers"
            )
        indices = None if rows.indices is None else np.ascontiguousarray(rows.indices)
        return KeptRows(cast(rows.values, dtype), rows.sample, rows.position, rows.token, indices)

    def _inputs(self, inputs: Any) -> Any:
        """Return the entries of a dict that the model takes: a data set may also have labels and texts."""
        if not isinstance(inputs, Mapping):
            return self._places(inputs)
        if self._job.inputs is not None:
            missing = [name for name in self._job.inputs if name not in inputs]
            if missing:
                raise HarvestError(f"the batch has no {missing[0]!r}: it has {', '.join(map(str, inputs))}")
            return {name: inputs[name] for name in self._job.inputs}
        wanted = [key for key in inputs if (self._parameters is None or key in self._parameters) and key != "labels"]
        if not wanted:
            named = ", ".join(sorted(self._parameters or ()))
            raise HarvestError(
                f"the model takes {named or 'nothing'}, and the batch has {', '.join(map(str, inputs))}: name what it "
                'is called with, inputs=["input_ids"], or give batches that are tensors or tuples'
            )
        return {key: inputs[key] for key in wanted}

    def _places(self, inputs: Any) -> Any:
        """Of a tuple the entries that the user names by their place."""
        if self._job.inputs is None:
            return inputs
        entries = inputs if isinstance(inputs, tuple) else (inputs,)
        for place in self._job.inputs:
            if not isinstance(place, int) or not 0 <= place < len(entries):
                raise HarvestError(
                    f"the batch has no [{place!r}]: its entries are 0 to {len(entries) - 1}, "
                    "which inputs=[0] names by their place"
                )
        return tuple(entries[int(place)] for place in self._job.inputs)


def has_samples(values: Array, batch: InputBatch) -> bool:
    """Return whether the first dimension of a tensor is that of the samples."""
    return bool(values.ndim) and values.shape[0] == len(batch.samples)


def checked_inputs(inputs: Any) -> tuple[Key, ...] | None:
    """Return the names or places of what the model is called with; one may be given alone."""
    if inputs is None:
        return None
    named = (inputs,) if isinstance(inputs, (str, int, np.integer)) else tuple(inputs)
    if not named or not all(isinstance(each, (str, int, np.integer)) and not isinstance(each, bool) for each in named):
        raise HarvestError(
            f'inputs must be names or places in the batch, got {inputs!r}: write inputs=["input_ids"] or [0]'
        )
    return tuple(each if isinstance(each, str) else int(each) for each in named)


def without_samples(site: str, shape: tuple[int, ...], samples: int) -> HarvestError:
    """Return the error for a site whose first dimension is not that of the samples."""
    return HarvestError(
        f"{site} must give one value for each of the {samples} samples of a batch in its first dimension, got "
        f"{list(shape)}: choose a site that has it; where each item of the data is one sample and no batch, write "
        "batch_size=32"
    )


def is_factory(model: Any) -> bool:
    """Return whether a model is to be made by calling what was given."""
    if not inspect.isclass(model) and (registered_for(model) is not None or not _is_function(model)):
        return False
    try:
        inspect.signature(model).bind()
    except (TypeError, ValueError):
        if inspect.isclass(model):
            raise HarvestError(
                f"{model.__qualname__} is a class that needs arguments: give a model, or a function that returns one, "
                f"tt.harvest(lambda: {model.__qualname__}(…), …)"
            ) from None
        return False
    return True


def _is_function(value: Any) -> bool:
    return inspect.isroutine(value) or isinstance(value, functools.partial)
