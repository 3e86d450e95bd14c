"""Counts for Prometheus, kept as plain integers: a call pays for a few additions."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from rollout_gateway.capture.trajectories import Registry
from rollout_gateway.serving.replicas import Fleet

_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """What the gateway counts."""

    def __init__(self, fleet: Fleet, registry: Registry) -> None:
        self._fleet, self._registry = fleet, registry
        self.calls: Counter[tuple[str, int]] = Counter()
        """By endpoint and status."""
        self._buckets = [0] * (len(_BOUNDS_S) + 1)
        self._seconds = 0.0
        self.loads = 0

    def call(self, endpoint: str, status: int, seconds: float) -> None:
        self.calls[endpoint, status] += 1
        self._buckets[bisect_left(_BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def text(self) -> str:
        """The exposition format, version 0.0.4."""
        lines = [
            "# HELP journeyman_calls_total Model calls answered.",
            "# TYPE journeyman_calls_total counter",
            *(
                f'journeyman_calls_total{{endpoint="{endpoint}",status="{status}"}} {count}'
                for (endpoint, status), count in sorted(self.calls.items())
            ),
            "# HELP journeyman_call_seconds Time from a call's arrival to the end of its answer.",
            "# TYPE journeyman_call_seconds histogram",
        ]
        total = 0
        for bound, count in zip((*_BOUNDS_S, "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'journeyman_call_seconds_bucket{{le="{bound}"}} {total}')
        lines += [
            f"journeyman_call_seconds_sum {self._seconds:.6f}",
            f"journeyman_call_seconds_count {total}",
        ]
        lines += _gauge(
            "trajectories_known", "Open trajectories in this replica's memory.", len(self._registry)
        )
        lines += _counter(
            "calls_not_recorded_total",
            "Calls that were answered and are not on the log (gateway.capture = async, or a power cut of the log).",
            self._registry.not_recorded,
        )
        lines += _counter(
            "adapter_loads_total", "Adapters loaded and proved, counted per server.", self.loads
        )
        lines += [
            "# HELP journeyman_replica_ready Whether a server takes calls.",
            "# TYPE journeyman_replica_ready gauge",
        ]
        lines += [
            f'journeyman_replica_ready{{replica="{r.name}"}} {int(r.ready)}' for r in self._fleet.replicas
        ]
        lines += [
            "# HELP journeyman_replica_calls Calls at a server now.",
            "# TYPE journeyman_replica_calls gauge",
        ]
        lines += [f'journeyman_replica_calls{{replica="{r.name}"}} {r.load}' for r in self._fleet.replicas]
        lines += [
            "# HELP journeyman_replica_adapters Adapters held.",
            "# TYPE journeyman_replica_adapters gauge",
        ]
        lines += [
            f'journeyman_replica_adapters{{replica="{r.name}"}} {len(r.loaded)}' for r in self._fleet.replicas
        ]
        return "\n".join(lines) + "\n"


def _gauge(name: str, meaning: str, value: float) -> list[str]:
    return [
        f"# HELP journeyman_{name} {meaning}",
        f"# TYPE journeyman_{name} gauge",
        f"journeyman_{name} {value}",
    ]


def _counter(name: str, meaning: str, value: int) -> list[str]:
    return [
        f"# HELP journeyman_{name} {meaning}",
        f"# TYPE journeyman_{name} counter",
        f"journeyman_{name} {value}",
    ]
