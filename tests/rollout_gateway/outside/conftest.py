"""A gateway without inference servers in front of providers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config, GatewayConfig, ModelConfig, NatsConfig, OutsideConfig
from tests.conftest import free_port
from tests.kits.settings import with_values
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess
from tests.rollout_gateway.outside.provider import Provider

KEY = "sk-provider-0123456789abcdef"
PRICES: dict[str, Any] = {"input_usd": 2.5, "cached_input_usd": 1.25, "cache_write_usd": 3.75, "output_usd": 10.0}

StartOutside = Callable[..., GatewayProcess]


@pytest.fixture
def provider() -> Iterator[Provider]:
    with Provider() as made:
        yield made


@pytest.fixture
def second_provider() -> Iterator[Provider]:
    with Provider() as made:
        yield made


def table(provider: Provider, **more: Any) -> OutsideConfig:
    fields = {"name": "master", "url": provider.url, "model": "big", "api_key_env": "TEST_PROVIDER_KEY"}
    return OutsideConfig(**{**fields, **PRICES, **more})


@pytest.fixture
def start_outside(tmp_path: Path, nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartOutside]:
    """Starts gateways with these tables of outside models."""
    monkeypatch.setenv("TEST_PROVIDER_KEY", KEY)
    started: list[GatewayProcess] = []

    def start(*tables: OutsideConfig, crash_at: str = "", **settings: Any) -> GatewayProcess:
        config = Config(
            project=PROJECT,
            run_dir=str(tmp_path / f"run-{len(started)}"),
            nats=nats_config,
            outside=tables,
            models=(ModelConfig(name="tictactoe"),),
            gateway=with_values(GatewayConfig(), {"port": free_port(), "replicas.wait_s": 0.1, **settings}),
        )
        gateway = GatewayProcess(config)
        gateway.start(crash_at)
        started.append(gateway)
        return gateway

    yield start
    for gateway in started:
        gateway.stop()
