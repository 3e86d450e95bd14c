"""Ids that callers chose are remembered."""

from __future__ import annotations

import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.log.chosen_ids import first_used
from pipeline.streams import IDS

pytestmark = pytest.mark.anyio


async def test_an_id_is_remembered_once_for_all_gateways(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as one, Broker.connect(nats_config) as other:
        first = await first_used(one, "p", "mine")
        again = await first_used(other, "p", "mine")
        assert again == pytest.approx(first, abs=60)
        assert again == await first_used(one, "p", "mine")
        await first_used(one, "other project", "mine")
        assert (await one.js.stream_info(IDS.name)).state.messages == 2
