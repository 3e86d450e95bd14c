"""A gateway without inference servers in front of providers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.config import OutsideConfig
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway
from tests.rollout_gateway.outside.provider import Provider

KEY = "sk-provider-0123456789abcdef"
PRICES: dict[str, Any] = {"input_usd": 2.5, "cached_input_usd": 1.25, "cache_write_usd": 3.75, "output_usd": 10.0}

StartOutside = Callable[..., GatewayProcess]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """A provider whose key the gateways find in their environment (`table`)."""
    monkeypatch.setenv("TEST_PROVIDER_KEY", KEY)
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
def start_outside(start_front: StartGateway) -> StartOutside:
    """Starts gateways with these tables of outside models."""
    return lambda *tables, **settings: start_front(outside=tables, **settings)
