"""What `benchmarks.swaps` measures at length, as a test: no stream fails or blocks, every exchange tells the
truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import openai
import pytest

from benchmarks.swaps import check_labels, measure
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from tests.conftest import InferenceDouble
from tests.rollout_gateway.conftest import StartGateway, publish_adapter
from tests.rollout_gateway.kit import ASK, exchanges, older_than_before, serves

pytestmark = pytest.mark.anyio

SWAPS, STREAMS = 20, 64


@pytest.mark.vllm
async def test_swaps_under_64_streams(start_gateway: StartGateway, broker: Broker) -> None:
    gateway = start_gateway(max_loras=3)
    seen, streams = await measure(gateway, broker, swaps=SWAPS, streams=STREAMS, calm_s=5)
    labels = await check_labels(broker, streams, STREAMS)
    assert streams.failures == []
    assert (labels["mislabelled"], labels["versions"]) == (0, SWAPS + 1)
    assert labels["exchanges"] == seen["requests"] >= STREAMS
    assert labels["logprob_diff_own_max"] < 1e-3 < labels["logprob_diff_next_version_min"]
    # A new version does not wait until the streams of the old one have ended. How long the gaps between chunks are is
    # measured by `benchmarks.swaps` on a quiet machine.
    assert streams.beside


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    servers = [InferenceDouble(tmp_path_factory.mktemp("double")) for _ in range(2)]
    for server in servers:
        server.start()
    yield [server.url for server in servers]
    for server in servers:
        server.stop()


@pytest.mark.slow
@pytest.mark.timeout(400)  # with the start of two servers
@pytest.mark.parametrize("servers", [1, 2])
async def test_no_call_goes_back_to_an_older_version(
    start_gateway_alone: StartGateway, nats_config: NatsConfig, doubles: list[str], servers: int
) -> None:
    """30 versions come to servers with room for 3 while 4 trajectories make calls, two of them streamed. No call fails,
    each is recorded under the version that answered, and none is answered by an older version than a call that had
    ended when it began."""
    gateway = start_gateway_alone(urls=tuple(doubles[:servers]), max_loras=3)
    stopping, labels_seen = False, set[str]()

    async def keep_calling(lane: int) -> None:
        opened = gateway.open(id=f"lane-{lane}")
        ask: Any = {**ASK, "stream": lane % 2 == 1}
        async with openai.AsyncOpenAI(
            base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0
        ) as client:
            while not stopping:
                reply = await client.chat.completions.create(**ask)
                labels = {chunk.model async for chunk in reply} if ask["stream"] else {reply.model}
                assert len(labels) == 1
                labels_seen.update(labels)

    async with Broker.connect(nats_config) as broker:
        async with anyio.create_task_group() as lanes:
            for lane in range(4):
                lanes.start_soon(keep_calling, lane)
            for step in range(1, 31):
                await serves(gateway, await publish_adapter(broker, step), timeout_s=120)
            stopping = True
        recorded = [e for lane in range(4) for e in await exchanges(broker, f"lane-{lane}")]
    assert {e.status for e in recorded} == {"complete"}
    assert {e.policy_version for e in recorded} == labels_seen
    assert older_than_before([(e.started_at, e.at, e.step) for e in recorded]) == []
