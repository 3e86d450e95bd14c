"""A connection to a log of the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker


@pytest.fixture
async def broker(nats_config: NatsConfig) -> AsyncIterator[Broker]:
    async with Broker.connect(nats_config) as broker:
        yield broker
