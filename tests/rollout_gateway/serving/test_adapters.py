"""Real vLLM dies under calls. `test_swaps` shows that each version is loaded, proved and served."""

import asyncio
from functools import partial
from typing import Any

import anyio.to_thread
import openai
import pytest

from pipeline.events import PolicyLoaded
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.kits.waiting import until
from tests.rollout_gateway.conftest import GatewayProcess, publish_adapter
from tests.rollout_gateway.kit import ASK, counted, exchanges, serves

pytestmark = pytest.mark.vllm

CHOICES = 24
"""Of a call that is long enough to be cut off in its middle."""


async def test_a_killed_inference_server_is_a_delay_and_not_a_failure(
    gateway: GatewayProcess, broker: Broker, vllm_server: VllmServer
) -> None:
    if vllm_server.process is None:
        pytest.skip("the inference server was given and is not ours to kill")
    opened = gateway.open(id="patient")
    await publish_adapter(broker, 1)
    await serves(gateway, "tictactoe@1")
    async with openai.AsyncOpenAI(
        base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0, timeout=300
    ) as client:
        long: Any = {**ASK, "max_tokens": 240, "n": CHOICES, "extra_body": {"ignore_eos": True}}
        tries, again = 0, 0.0
        # The server's second life answers both calls if its first one died in the middle of the long one. A server that
        # is faster than this process may have answered that before.
        while again < CHOICES * 240:
            tries += 1
            before = await _sampled(vllm_server)
            call = asyncio.ensure_future(client.chat.completions.create(**long))
            await until(partial(_sampled, vllm_server, before))
            await anyio.to_thread.run_sync(vllm_server.kill)
            later = asyncio.ensure_future(client.chat.completions.create(**ASK))
            await anyio.to_thread.run_sync(vllm_server.start)
            assert (await call).model == (await later).model == "tictactoe@1"
            again = await _sampled(vllm_server)
    lives = {r.event.server_start for r in await broker.read(PolicyLoaded)}
    assert len(lives) == 1 + tries
    assert len(await exchanges(broker, "patient")) == tries * (CHOICES + 1)


async def _sampled(server: VllmServer, since: float = 0.0) -> float:
    """How many tokens the server has sampled, asked without holding up the calls that this process makes. `since`: of
    how many more it is asked."""
    return await anyio.to_thread.run_sync(counted, server, "generation_tokens_total") - since
