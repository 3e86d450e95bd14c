"""Metrics in Prometheus' text format, and what `deploy/` makes of them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.api.metrics import Metrics
from rollout_gateway.capture.registry import Registry
from rollout_gateway.serving.replicas import Fleet

pytestmark = pytest.mark.anyio

DEPLOY = Path(__file__).parents[3] / "deploy"


async def test_counts_are_read_as_they_were_counted_and_labels_are_escaped() -> None:
    registry = Registry(cast(Any, None), "p", TrajectoryTokens(b"s" * 32, "p"))
    fleet = Fleet()
    fleet.add("http://127.0.0.1:1")
    fleet.replicas[0].name = 'a"b\\c\nd'
    fleet.replicas[0].ready = True
    metrics = Metrics(fleet, registry, Counter())
    for seconds in (0.001, 0.03, 500.0):
        metrics.count_call("/v1/chat/completions", 200, seconds)
    families = {f.name: f for f in text_string_to_metric_families(metrics.text().decode())}
    (calls,) = families["journeywork_calls"].samples
    assert (calls.name, calls.labels, calls.value) == (
        "journeywork_calls_total",
        {"endpoint": "/v1/chat/completions", "status": "200"},
        3,
    )
    buckets = {s.labels["le"]: s.value for s in families["journeywork_call_seconds"].samples if "le" in s.labels}
    assert (buckets["0.005"], buckets["0.05"], buckets["120.0"], buckets["+Inf"]) == (1, 2, 2, 3)
    (ready,) = families["journeywork_replica_ready"].samples
    assert (ready.labels["replica"], ready.value) == ('a"b\\c\nd', 1)


async def test_the_dashboard_asks_for_metrics_that_exist_and_for_all_of_them() -> None:
    fleet = Fleet()
    fleet.add("http://127.0.0.1:1")
    metrics = Metrics(fleet, Registry(cast(Any, None), "p", TrajectoryTokens(b"s" * 32, "p")), Counter())
    metrics.count_call("/v1/chat/completions", 200, 0.1)
    series = {line.split("{")[0].split(" ")[0] for line in metrics.text().decode().splitlines()}
    # A histogram's sum and count, and when a counter was made, are in no panel.
    offered = {s for s in series if re.match(r"journeywork_(?!.*_(sum|count|created)$)", s)}
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert {name for query in queries for name in re.findall(r"\bjourneywork_\w+", query)} == offered
    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    assert [name for name in offered if name.removesuffix("_bucket") not in page] == []
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gateway:8700"]}]
