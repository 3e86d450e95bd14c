"""Metrics for Prometheus. Counts are plain integers, so a call pays for a few additions; they become metrics when they
are read."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from rollout_gateway.capture.registry import Registry
from rollout_gateway.serving.replicas import Fleet

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics(Collector):
    """The gateway's counters."""

    def __init__(self, fleet: Fleet, registry: Registry, shadows: Counter[str]) -> None:
        """`shadows`: shadow calls by how they ended."""
        self._fleet, self._registry, self._shadows = fleet, registry, shadows
        self._calls: Counter[tuple[str, int]] = Counter()
        """Number of requests by endpoint and status."""
        self._buckets = [0] * (len(_BOUNDS_S) + 1)
        self._seconds = 0.0
        self.loads = 0
        """Adapters loaded."""
        self._collectors = CollectorRegistry()
        self._collectors.register(self)

    def count_call(self, endpoint: str, status: int, seconds: float) -> None:
        self._calls[endpoint, status] += 1
        self._buckets[bisect_left(_BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._collectors)

    def collect(self) -> Iterator[Metric]:
        calls = CounterMetricFamily("journeywork_calls", "Model calls answered.", labels=("endpoint", "status"))
        for (endpoint, status), count in sorted(self._calls.items()):
            calls.add_metric((endpoint, str(status)), count)
        yield calls
        bounds = [*map(floatToGoString, _BOUNDS_S), "+Inf"]
        totals = [sum(self._buckets[: i + 1]) for i in range(len(bounds))]
        yield HistogramMetricFamily(
            "journeywork_call_seconds",
            "Time from a call's arrival to the end of its answer.",
            buckets=list(zip(bounds, totals, strict=True)),
            sum_value=self._seconds,
        )
        yield GaugeMetricFamily(
            "journeywork_trajectories_known", "Open trajectories in this replica's memory.", len(self._registry)
        )
        shadows = CounterMetricFamily("journeywork_shadows", "Shadow calls by how they ended.", labels=("result",))
        for result, count in sorted(self._shadows.items()):
            shadows.add_metric((result,), count)
        yield shadows
        yield CounterMetricFamily("journeywork_adapter_loads", "Adapters loaded, counted per server.", self.loads)
        for name, meaning, value in (
            ("ready", "Whether a server takes calls.", lambda r: int(r.ready)),
            ("calls", "Calls at a server now.", lambda r: r.load),
            ("adapters", "Adapters that a server holds.", lambda r: len(r.loaded)),
        ):
            gauge = GaugeMetricFamily(f"journeywork_replica_{name}", meaning, labels=("replica",))
            for replica in self._fleet.replicas:
                gauge.add_metric((replica.name,), value(replica))
            yield gauge
