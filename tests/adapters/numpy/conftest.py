"""A watched object whose records are kept in memory."""

from __future__ import annotations

import pytest

import tensortap as tt


class Seen:
    """A tap and what it recorded."""

    def __init__(self, tap, memory):
        self.tap = tap
        self.memory = memory

    @property
    def records(self):
        self.tap.flush()
        return sorted(self.memory.records, key=lambda record: (record.step, record.seq))

    @property
    def places(self):
        return [str(record.place) for record in self.records]

    def of(self, place):
        return [record for record in self.records if str(record.place) == place]


@pytest.fixture
def watch():
    """`watch(model, *probes)` as tt.watch, into memory; closed at the end whatever happens."""
    taps = []

    def begin(model, *probes, **options):
        memory = tt.Memory()
        taps.append(tt.watch(model, *probes, to=memory, **{"strict": True, **options}))
        return Seen(taps[-1], memory)

    yield begin
    for tap in taps:
        tap.close()
