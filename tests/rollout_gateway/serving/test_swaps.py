"""What `benchmarks.gateway_swaps` measures at length, as a test: no stream fails or blocks, every exchange tells the
truth."""

from __future__ import annotations

import pytest

from benchmarks.gateway_swaps import check_labels, measure
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import StartGateway

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]

SWAPS, STREAMS = 20, 64


async def test_swaps_under_64_streams(start_gateway: StartGateway, nats_config: NatsConfig) -> None:
    gateway = start_gateway(max_loras=3)
    async with Broker.connect(nats_config) as broker:
        seen, streams = await measure(gateway, broker, swaps=SWAPS, streams=STREAMS, calm_s=5)
        labels = await check_labels(broker, streams, STREAMS)
    assert streams.failures == []
    assert (labels["mislabelled"], labels["versions"]) == (0, SWAPS + 1)
    assert labels["exchanges"] == seen["requests"] >= STREAMS
    assert labels["logprob_diff_own_max"] < 1e-3 < labels["logprob_diff_next_version_min"]
    # A new version does not wait until the streams of the old one have ended. How long the gaps between chunks are is
    # measured by `benchmarks.gateway_swaps` on a quiet machine.
    assert streams.beside
