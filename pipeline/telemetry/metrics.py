"""`GET /metrics` of a service in Prometheus' text format, if `metrics.ports` names a port for it.

The gateway has a page of its own with more figures (`rollout_gateway.api.metrics`). Metrics hold counts, sizes and
names of events and consumers; no content, no keys.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.config import Config, ConfigError
from pipeline.running.environment import process_number
from pipeline.telemetry import counts

_PROCESSES = {"rollout_gateway": "gateway", "pipeline.telemetry.exporter": "telemetry"}
"""Names of service modules whose process is called something else."""


class LogCollector(Collector):
    """What the process did with the log."""

    def collect(self) -> Iterator[Metric]:
        counters: tuple[tuple[str, str, str, Mapping[str, int]], ...] = (
            ("journeywork_events_published", "Events that the log acknowledged.", "event", counts.published),
            ("journeywork_events_taken", "Events that a consumer was given.", "consumer", counts.taken),
            ("journeywork_events_done", "Events that a consumer acknowledged.", "consumer", counts.done),
        )
        for name, meaning, label, figures in counters:
            counter = CounterMetricFamily(name, meaning, labels=(label,))
            for value, count in sorted(figures.items()):
                counter.add_metric((value,), count)
            yield counter
        waiting = GaugeMetricFamily(
            "journeywork_events_pending",
            "Events that wait behind the newest one that a consumer was given.",
            labels=("consumer",),
        )
        for consumer, count in sorted(counts.pending.items()):
            waiting.add_metric((consumer,), count)
        yield waiting


def registry() -> CollectorRegistry:
    """Return the metrics of this process: the log, CPU time, memory, open files, garbage collection."""
    metrics = CollectorRegistry()
    metrics.register(LogCollector())
    ProcessCollector(registry=metrics)
    GCCollector(registry=metrics)
    return metrics


@contextmanager
def served(config: Config, name: str) -> Iterator[None]:
    """Serve the metrics of service `name`, in a thread, if `metrics.ports` names a port for it. Further processes of
    the service on this machine take the ports after it.

    Raises `ConfigError` if the port can't be used."""
    process = _PROCESSES.get(name, name)
    port = next((port for service, port in config.metrics.ports.items() if service == process), None)
    if port is None or os.environ.get("RANK", "0") != "0":  # one page for all ranks of a trainer
        yield
        return
    port += process_number() - 1
    try:
        server, thread = start_http_server(port, config.metrics.host, registry())
    except OSError as error:
        raise ConfigError(
            f"metrics.ports.{process}: {config.metrics.host}:{port} can't be used: {error}; name another port"
        ) from error
    close: Callable[[], None] = server.server_close
    try:
        yield
    finally:
        server.shutdown()
        close()
        thread.join()
