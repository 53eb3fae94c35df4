"""What the contract's tests share: a tap on a subject, and how its records are compared with the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference

import tensortap as tt
from tensortap.adapters import registry

CLOSE = {"rel": 1e-4, "abs": 1e-5}
COMPARED = ("numel", "nan", "zeros", "min", "max", "mean", "std", "l1", "l2")


def given(subject):
    return registry.capabilities_of(subject.framework)


def require(subject, *features):
    """What is not given is refused by a sentence, and there is no more to ask."""
    missing = [feature for feature in features if not given(subject).gives(feature)]
    if missing:
        assert all(len(given(subject).refusal(feature)) > 20 for feature in missing)
        pytest.skip(given(subject).refusal(missing[0]))


def name(subject, layer):
    return getattr(subject, "names", {}).get(layer, layer)


def layers(subject):
    return [layer for layer in reference.LAYERS if layer in getattr(subject, "names", reference.LAYERS)]


class Watched:
    """A tap on a subject, into memory."""

    def __init__(self, subject, *probes, **options):
        self.subject = subject
        self.memory = tt.Memory()
        self.tap = subject.watch(*probes, to=self.memory, **options)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.tap.close()

    def step(self, seed=0, **metrics):
        output = self.subject.call(reference.batch(seed))
        self.tap.step(**metrics)
        return output

    @property
    def records(self):
        self.tap.flush()
        return sorted(self.memory.records, key=lambda record: (record.step, record.seq))

    @property
    def places(self):
        return sorted({str(record.place) for record in self.records})

    @property
    def steps(self):
        return sorted({record.step for record in self.records})

    def of(self, layer, port="output"):
        """A layer's records, in order of call."""
        place = f"{name(self.subject, layer)}:{port}"
        return sorted((r for r in self.records if str(r.place) == place), key=lambda r: (r.step, r.call))


def same(record, array):
    """Whether a record has the statistics of an array, up to the rounding in which frameworks differ."""
    summary = tt.summarize(np.ascontiguousarray(array))
    return {key: record[key] for key in COMPARED} == pytest.approx({key: summary[key] for key in COMPARED}, **CLOSE)
