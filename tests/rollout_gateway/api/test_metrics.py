"""Metrics in Prometheus' text format, and what `deploy/` makes of them."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import yaml

from rollout_gateway.api.metrics import Metrics
from rollout_gateway.serving.replicas import Fleet
from tests.rollout_gateway.kit import registry_of

DEPLOY = Path(__file__).parents[3] / "deploy"


async def test_the_dashboard_asks_for_metrics_that_exist_and_for_all_of_them() -> None:
    fleet = Fleet()
    fleet.add("http://127.0.0.1:1")
    metrics = Metrics(fleet, registry_of(cast(Any, None)), Counter())
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
