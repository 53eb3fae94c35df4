"""Publish chosen sites as Prometheus metrics, for models that serve.

This uses `prometheus_client` and not OpenTelemetry's exporter: servers that are scraped have it already, with a
registry and an endpoint of their own, and it needs no SDK.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

from tensortap.errors import ProbeError, needs
from tensortap.record.step import Record
from tensortap.sinks.line import nonfinite
from tensortap.sinks.numbers import STATS, numbers
from tensortap.sinks.serving import ServingSink, help_for

Labels = tuple[str, ...]


class Prometheus(ServingSink):
    """Add the statistics of chosen sites to a registry, the default one if none is given.

    >>> import tensortap as tt
    >>> tt.watch(model, "head", to=tt.Prometheus("head"))                          # doctest: +SKIP

    Gauges `tensortap_tensor_std{site="head",port="output",rank="0"}` and so on hold the newest record; the counters
    `…_records_total` and `…_nonfinite_elements_total` add up. They leave the registry when the tap closes.
    """

    def __init__(
        self, *sites: str, stats: Iterable[str] = STATS, most: int = 100, registry: Any = None,
        prefix: str = "tensortap_tensor",
    ) -> None:  # fmt: skip
        super().__init__(sites, stats, most)
        with needs("Prometheus(…)", "tensortap[prometheus]"):
            from prometheus_client import REGISTRY
            from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        self._gauge, self._counter = GaugeMetricFamily, CounterMetricFamily
        self._prefix = prefix
        self._newest: dict[Labels, dict[str, float]] = {}
        self._totals: dict[Labels, list[int]] = {}
        self._lock = threading.Lock()  # a scrape comes on the server's thread
        self._registry = REGISTRY if registry is None else registry
        self._register()

    def take(self, record: Record, labels: dict[str, str]) -> None:
        """Remember the newest numbers of a record and add to the counts."""
        key = tuple(labels.values())
        found = numbers(record, self._stats)
        with self._lock:
            self._newest[key] = found
            total = self._totals.setdefault(key, [0, 0])
            total[0] += 1
            total[1] += nonfinite(record.summary)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics that a scrape reads."""
        names = ("site", "port", "rank")
        with self._lock:
            newest, totals = dict(self._newest), {key: tuple(total) for key, total in self._totals.items()}
        for stat in self._stats:
            family = self._gauge(f"{self._prefix}_{stat}", help_for(stat), labels=names)
            for key, found in newest.items():
                if stat in found:
                    family.add_metric(key, found[stat])
            yield family
        for i, (name, text) in enumerate(_COUNTERS.items()):
            counter = self._counter(f"{self._prefix}_{name}", text, labels=names)
            for key, total in totals.items():
                counter.add_metric(key, total[i])
            yield counter

    def describe(self) -> list[Any]:
        """Return the metrics, by whose names a registry tells two taps apart."""
        return list(self.collect())

    def close(self) -> None:
        """Leave the registry."""
        self._registry.unregister(self)

    def __str__(self) -> str:
        return "Prometheus"

    def _register(self) -> None:
        try:
            self._registry.register(self)
        except ValueError:
            raise ProbeError(
                f"the registry holds {self._prefix}_… already, of another tap; name these differently: "
                f"Prometheus(…, prefix={self._prefix + '_2'!r})"
            ) from None


_COUNTERS = {"records": "tensors recorded", "nonfinite_elements": "NaN and infinite elements so far"}
