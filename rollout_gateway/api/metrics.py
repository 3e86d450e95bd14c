"""The gateway's metrics, which Prometheus reads from `/metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout_gateway.capture.registry import Registry
from rollout_gateway.serving.replicas import Fleet

CONTENT_TYPE = CONTENT_TYPE_LATEST.encode()
_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics(Collector):
    """Counts of calls and loads, and the state of servers and runs at the moment when it is asked for."""

    def __init__(self, fleet: Fleet, registry: Registry, shadows: Mapping[str, int]) -> None:
        """`shadows`: shadow calls by how they ended."""
        self._fleet, self._registry, self._shadows = fleet, registry, shadows
        self._collectors = to = CollectorRegistry()
        self._calls = Counter("journeywork_calls", "Model calls answered.", ("endpoint", "status"), registry=to)
        meaning = "Time from a call's arrival to the end of its answer."
        self._seconds = Histogram("journeywork_call_seconds", meaning, registry=to, buckets=_BOUNDS_S)
        self.loads = Counter("journeywork_adapter_loads", "Adapters loaded, counted per server.", registry=to)
        to.register(self)

    def count_call(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a model call that was answered, by the path and the status of its answer."""
        self._calls.labels(endpoint, status).inc()
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._collectors)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read only when they are asked for: of runs in memory, shadow calls and inference
        servers. `generate_latest` calls it."""
        yield GaugeMetricFamily(
            "journeywork_trajectories_known", "Open trajectories in this replica's memory.", len(self._registry)
        )
        shadows = CounterMetricFamily("journeywork_shadows", "Shadow calls by how they ended.", labels=("result",))
        for result, count in sorted(self._shadows.items()):
            shadows.add_metric((result,), count)
        yield shadows
        for name, meaning, value in (
            ("ready", "Whether a server takes calls.", lambda r: int(r.ready)),
            ("calls", "Calls at a server now.", lambda r: r.load),
            ("adapters", "Adapters that a server holds.", lambda r: len(r.loaded)),
        ):
            gauge = GaugeMetricFamily(f"journeywork_replica_{name}", meaning, labels=("replica",))
            for replica in self._fleet.replicas:
                gauge.add_metric((replica.name,), value(replica))
            yield gauge
