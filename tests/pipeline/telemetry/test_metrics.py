"""Metrics of services, and the Grafana dashboard over them."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.config import Config, ConfigError, MetricsConfig, NatsConfig
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import Broker
from pipeline.telemetry import metrics
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.api.metrics import Metrics
from rollout_gateway.capture.registry import Registry
from rollout_gateway.serving.replicas import Fleet
from tests.conftest import free_port

DEPLOY = Path(__file__).parents[3] / "deploy"
OPERATIONS = DEPLOY.parent / "docs" / "operations.md"


def read(port: int) -> dict[tuple[str, str], float]:
    """Name and first label's value to figure, of a page."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (s.name, next(iter(s.labels.values()), "")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def at(port: int) -> Config:
    return Config(metrics=MetricsConfig(ports={"judge": port}))


@pytest.mark.anyio
async def test_a_service_counts_what_it_does_with_the_log(nats_config: NatsConfig) -> None:
    port = free_port()
    with metrics.served(at(port), "judge"):
        before = read(port)
        async with Broker.connect(nats_config) as broker, broker.consume("telemetry-rollouts") as consumed:
            for name in ("a", "b", "c"):
                await broker.publish(TrajectoryOpened(project="p", trajectory=name, model="m", group="g"))
            taken = []
            with anyio.fail_after(20):
                while len(taken) < 3:
                    taken += await consumed.batch(3)
            await taken[0].ack()
        after = read(port)
    grown = {key: after[key] - before.get(key, 0) for key in after if key[0].endswith("_total")}
    assert grown["journeywork_events_published_total", "rollout.opened"] == 3
    assert grown["journeywork_events_taken_total", "telemetry-rollouts"] == 3
    assert grown["journeywork_events_done_total", "telemetry-rollouts"] == 1
    assert after["journeywork_events_pending", "telemetry-rollouts"] == 0


def test_a_service_that_is_not_named_has_no_page() -> None:
    port = free_port()
    with metrics.served(at(port), "store"), pytest.raises(OSError, match="refused"):
        read(port)


def test_a_port_in_use_is_named() -> None:
    port = free_port()
    taken = f"metrics.ports.judge: 127.0.0.1:{port} can't be used"
    with (
        metrics.served(at(port), "judge"),
        pytest.raises(ConfigError, match=re.escape(taken)),
        metrics.served(at(port), "judge"),
    ):
        pass


def offered() -> set[str]:
    """Names of all series that the gateway and the services offer."""
    registry = Registry(cast(Any, None), "p", TrajectoryTokens(b"s" * 32, "p"))
    fleet = Fleet()
    fleet.add("http://127.0.0.1:1")
    gateway = Metrics(fleet, registry)
    gateway.count_call("/v1/chat/completions", 200, 0.1)
    metrics.counts.published["e"] += 1
    metrics.counts.taken["c"] += 1
    metrics.counts.done["c"] += 1
    metrics.counts.pending["c"] = 0
    text = gateway.text().decode() + generate_latest(metrics.registry()).decode()
    return {
        line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and not line.startswith("#")
    }


def queries() -> list[str]:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    return [target["expr"] for panel in board["panels"] for target in panel["targets"]]


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="process_* comes from /proc")
async def test_the_dashboard_asks_for_metrics_that_exist_and_for_all_of_ours() -> None:
    asked = {
        name for query in queries() for name in re.findall(r"\b(?:journeywork|process|python)_\w+", query)
    }
    assert asked <= offered()
    ours = {name for name in offered() if name.startswith("journeywork_")}
    # A histogram's sum and count, and when a counter was made, are in no panel.
    assert {n for n in ours if not n.endswith(("_sum", "_count", "_created"))} == {
        n for n in asked if n.startswith("journeywork_")
    }
    text = OPERATIONS.read_text()
    assert [n for n in asked if n.startswith("journeywork_") and n.removesuffix("_bucket") not in text] == []


def test_the_dashboards_panels_do_not_overlap() -> None:
    panels = json.loads((DEPLOY / "grafana.json").read_text())["panels"]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels]
    assert len(set(places)) == len(panels) == len({p["id"] for p in panels})


def test_what_prometheus_scrapes_is_what_compose_starts() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {t for job in jobs for s in job["static_configs"] for t in s["targets"]}
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    settings = tomllib.loads((DEPLOY / "compose.toml").read_text())
    ports = {**settings["metrics"]["ports"], "gateway": settings["gateway"]["port"]}
    assert targets == {f"{name}:{port}" for name, port in ports.items()}
    assert set(ports) <= set(services)
