"""Publish chosen sites as OpenTelemetry metrics, for models that serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from tensortap.errors import needs
from tensortap.record.step import Record
from tensortap.sinks.line import nonfinite
from tensortap.sinks.numbers import STATS, numbers
from tensortap.sinks.serving import ServingSink, help_for

_NAME: Final = "tensortap.tensor"
_BOUNDARIES: Final = [4.0**power for power in range(-10, 11)]


class OpenTelemetry(ServingSink):
    """Set a gauge for each statistic of each chosen site, through the meter provider that your application has.

    >>> import tensortap as tt
    >>> tt.watch(model, "head", to=tt.OpenTelemetry("head"))                       # doctest: +SKIP

    Gauges `tensortap.tensor.std` and so on hold the newest record; the counters `…records` and
    `…nonfinite_elements` add up; the histogram `…absmax_seen` is over records, that is over requests. Attributes
    are `site`, `port` and `rank`.
    """

    def __init__(self, *sites: str, stats: Iterable[str] = STATS, most: int = 100, meter: Any = None) -> None:
        super().__init__(sites, stats, most)
        with needs("OpenTelemetry(…)", "tensortap[otel]"):
            from opentelemetry.metrics import get_meter
        meter = meter or get_meter("tensortap")
        self._gauges = {s: meter.create_gauge(f"{_NAME}.{s}", description=help_for(s)) for s in self._stats}
        self._records = meter.create_counter(f"{_NAME}.records", description="tensors recorded")
        self._bad = meter.create_counter(f"{_NAME}.nonfinite_elements", description="NaN and infinite elements so far")
        self._seen = meter.create_histogram(
            f"{_NAME}.absmax_seen",
            description="largest finite magnitude of each tensor recorded",
            explicit_bucket_boundaries_advisory=_BOUNDARIES,
        )

    def take(self, record: Record, labels: dict[str, str]) -> None:
        """Set the gauges of a record and add to the counters."""
        found = numbers(record, [*self._stats, "absmax"])
        for stat, gauge in self._gauges.items():
            if stat in found:
                gauge.set(found[stat], labels)
        self._records.add(1, labels)
        self._bad.add(nonfinite(record.summary), labels)
        if "absmax" in found:
            self._seen.record(found["absmax"], labels)

    def __str__(self) -> str:
        return "OpenTelemetry"
