"""The samples of one scrape by metric, and their rendering as text for Prometheus.

Only the first scrape imports this module, because prometheus-client loads slowly. Each metric is
rendered separately, so that the event loop can run between two of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from tidelog.broker.metrics.definitions import COUNTER, HISTOGRAM, METRICS
from tidelog.broker.network.counters import Histogram

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Exposition:
    """`add` takes a metric's name, a value, and the values of its labels in the table's order."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        self._family(name).add_metric(labels, value)  # type: ignore[attr-defined]

    def add_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        buckets, count = [], 0
        for bound, bucket_count in zip((*histogram.bounds, None), histogram.counts):
            count += bucket_count
            buckets.append(("+Inf" if bound is None else repr(bound), float(count)))
        self._family(name).add_metric(labels, buckets, histogram.total)  # type: ignore[attr-defined]

    def _family(self, name: str) -> Family:
        family = self._families.get(name)
        if family is None:
            metric = METRICS[name]
            make = {COUNTER: CounterMetricFamily, HISTOGRAM: HistogramMetricFamily}.get(metric.kind, GaugeMetricFamily)
            family = self._families[name] = make(name, metric.help, labels=metric.labels)
        return family

    def families(self) -> list[Family]:
        return list(self._families.values())


class _SingleFamilyRegistry:
    """A registry with one metric family."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Family]:
        yield self._family


def render(family: Family) -> bytes:
    return generate_latest(_SingleFamilyRegistry(family))


def process_registry() -> CollectorRegistry:
    """The metrics of this process and its interpreter: memory, CPU, files, garbage collection."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def process_families(registry: CollectorRegistry) -> Iterable[Family]:
    return registry.collect()
