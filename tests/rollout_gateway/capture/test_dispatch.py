"""Calls that are cancelled or fail before an inference server answered."""

import asyncio
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import openai
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from rollout_gateway.capture.exchange import Caller
from rollout_gateway.dialects.endpoints import read_chat
from rollout_gateway.http.errors import ApiError, ClientGoneError
from rollout_gateway.http.upstream import UpstreamReply
from tests.conftest import InferenceDouble
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.gateway_parts import parts
from tests.rollout_gateway.kit import ASK, exchanges, of_servers

CALL = read_chat(msgspec.json.encode({"model": "tictactoe", "messages": []}))


async def test_a_client_that_leaves_before_a_server_was_asked_is_not_recorded(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    server = FakeVllm()
    async with parts(nats_config, tmp_path, [server]) as gateway:
        await server.stop()
        gateway.fleet.replicas[0].suspect()
        await gateway.open("t")
        caller = Caller(await gateway.registry.find("t"))
        asyncio.get_running_loop().call_soon(caller.cancellation.cancel, ClientGoneError())
        with anyio.fail_after(60), pytest.raises(ClientGoneError):
            await gateway.chat.answer(CALL, caller)
        assert caller.trajectory is not None
        assert caller.trajectory.in_flight == 0
        assert await exchanges(gateway.broker, "t") == []
        await server.start()


async def test_an_answer_that_is_too_long_is_the_callers_doing(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is broken off and recorded, no second server is asked, and the first one stays in use."""
    server = FakeVllm()
    async with parts(nats_config, tmp_path, [server]) as gateway:
        await gateway.open("t")
        monkeypatch.setattr(UpstreamReply, "max_bytes", 150)
        with pytest.raises(ApiError, match="Ask for fewer choices") as refused:
            await gateway.call("t")
        assert (refused.value.status, refused.value.code, len(server.calls)) == (502, "bad_upstream", 1)
        assert gateway.fleet.replicas[0].ready
        (event,) = await exchanges(gateway.broker, "t")
        assert (event.status, event.policy_version) == ("failed", "tictactoe@0")


_TEXT = [{"role": "user", "content": "x"}]


async def test_a_malformed_call_is_the_callers_fault(
    start_gateway_alone: StartGateway, inference_double: InferenceDouble
) -> None:
    """The double answers 500 to it. The caller learns which field is wrong, and the server stays in use."""
    gateway = start_gateway_alone(urls=(inference_double.url,))
    gateway.open(id="t")  # the server is there
    for field, body in (
        ("tools", {"messages": _TEXT, "tools": [None]}),
        ("tool_calls", {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"a": 1}]}]}),
        ("content", {"messages": [{"role": "user", "content": [{"type": "nonsense"}]}]}),
        ("content", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
        ("content", {"messages": [{"role": "user", "content": {"a": 1}}]}),
        ("tools", {"messages": _TEXT, "tools": 1}),  # no server is asked
    ):
        asked = {"model": "tictactoe", "max_tokens": 1, **body}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=asked)
        assert answer.status_code == 400, body
        assert field in answer.text
        metrics = httpx.get(f"{gateway.url}/metrics").text
        assert of_servers(metrics, "ready") == [1]
    assert 'journeywork_calls_total{endpoint="/v1/chat/completions",status="400"} 6' in metrics


class Deadly(FakeVllm):
    """Ends at once, with all connections, where a message says `die`, and is started again."""

    deaths = 0

    async def before(self, path: str, body: Any) -> None:
        if "die" in str(body.get("messages")):
            self.deaths += 1
            self.restarting = asyncio.ensure_future(self._restart())
            await asyncio.Event().wait()  # until `stop` cancels it

    async def _restart(self) -> None:
        await self.stop()
        await asyncio.sleep(0.5)  # as long as a process takes to start, and nobody listens
        await self.start()


@pytest.mark.slow
async def test_a_call_that_ends_its_servers_is_sent_to_two_and_recorded(
    start_gateway_alone: StartGateway, broker: Broker
) -> None:
    """OpenAI's client does not repeat the call."""
    server = Deadly()
    await server.start()
    gateway = await anyio.to_thread.run_sync(lambda: start_gateway_alone(urls=(server.url,)))
    opened = gateway.open(id="t")
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"], max_retries=8) as agent:
        with pytest.raises(openai.APIStatusError, match="each failed before it had answered") as failed:
            await agent.chat.completions.create(**{**ASK, "messages": [{"role": "user", "content": "die"}]})
        assert (failed.value.status_code, failed.value.code, server.deaths) == (502, "servers_failed", 2)
        assert (await agent.chat.completions.create(**ASK)).choices
    recorded = await exchanges(broker, "t")
    assert [(e.status, e.sampled_ids) for e in recorded[:1]] == [("failed", b"")]
    assert [e.status for e in recorded[1:]] == ["complete"]
    await anyio.to_thread.run_sync(gateway.stop)
    await server.stop()
