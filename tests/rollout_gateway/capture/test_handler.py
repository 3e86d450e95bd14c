"""Model calls through the gateway, against real vLLM and a real log, with the official client."""

import asyncio
import json
from functools import partial
from typing import Any

import anyio.to_thread
import httpx
import msgspec
import openai
import pytest

from pipeline.events import TrajectoryCompleted, unpack_ids, unpack_logprobs
from pipeline.log.broker import Broker
from tests.conftest import NatsServer, VllmServer
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway
from tests.rollout_gateway.kit import ASK, direct, exchanges

pytestmark = pytest.mark.inference

ADDED = ("prompt_token_ids", "token_ids", "prompt_text")


async def test_a_run_is_on_the_log_exactly_as_it_was(
    gateway: GatewayProcess, broker: Broker, vllm_server: VllmServer
) -> None:
    opened = gateway.open(group="g1", task="t", metadata={"who": "me"}, id="run.1")
    client = gateway.agent(opened)
    seeded = {**ASK, "seed": 5, "extra_body": {"return_token_ids": False}}
    reply = client.chat.completions.create(**seeded)
    assert reply.model == "tictactoe@0"
    assert reply.choices[0].logprobs is None
    assert not any(name in reply.model_dump_json() for name in ADDED)
    done = gateway.complete("run.1", reward=0.5, rewards={"speed": 1.0}, metrics={"turns": 1})
    assert (done.status_code, done.json()["exchanges"], done.json()["outcome"]) == (200, 1, "scored")

    said = direct(vllm_server, seed=5)
    (event,) = await exchanges(broker, "run.1")
    assert unpack_ids(event.prompt_ids).tolist() == said["prompt_token_ids"]
    assert unpack_ids(event.sampled_ids).tolist() == said["choices"][0]["token_ids"]
    logprobs = [entry["logprob"] for entry in said["choices"][0]["logprobs"]["content"]]
    assert unpack_logprobs(event.logprobs).tolist() == pytest.approx(logprobs, abs=1e-4)
    assert (event.policy_version, event.step, event.group, event.finish_reason) == (
        "tictactoe@0",
        0,
        "g1",
        said["choices"][0]["finish_reason"],
    )
    assert json.loads(event.request)["messages"] == ASK["messages"]
    assert json.loads(event.response) == json.loads(reply.model_dump_json(exclude_unset=True))
    (completed,) = await broker.read(TrajectoryCompleted)
    assert (completed.event.reward, completed.event.exchanges, completed.event.group) == (0.5, 1, "g1")
    assert completed.headers["traceparent"].startswith("00-")


async def test_a_streamed_call_is_recorded_before_it_ends(
    gateway: GatewayProcess, broker: Broker, vllm_server: VllmServer
) -> None:
    opened = gateway.open(group="g")
    async with openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        stream = await client.chat.completions.create(
            **{**ASK, "max_tokens": 20, "seed": 11}, stream=True, stream_options={"include_usage": True}
        )
        text, usage, reason = "", None, None
        async for chunk in stream:
            assert not any(name in chunk.model_dump_json() for name in ADDED)
            for choice in chunk.choices:
                assert choice.logprobs is None
                text += choice.delta.content or ""
                if choice.finish_reason:
                    reason = choice.finish_reason
                    # A client that acts on the reason finds the call on the log already.
                    assert len(await exchanges(broker, opened["id"])) == 1
            usage = chunk.usage or usage
    (event,) = await exchanges(broker, opened["id"])
    said = direct(vllm_server, seed=11, max_tokens=20)
    assert usage is not None
    assert unpack_ids(event.sampled_ids).tolist() == said["choices"][0]["token_ids"]
    assert len(event.sampled_ids) == len(event.logprobs) == 4 * usage.completion_tokens
    assert unpack_ids(event.prompt_ids).tolist() == said["prompt_token_ids"]
    assert (event.finish_reason, event.streamed, event.status) == (reason, True, "complete")
    message = json.loads(event.response)["choices"][0]["message"]
    assert message["content"] == text == said["choices"][0]["message"]["content"]
    assert event.first_token_at >= event.started_at > 0


async def test_a_client_that_asks_for_logprobs_and_ids_gets_them(gateway: GatewayProcess) -> None:
    client = gateway.agent(gateway.open())
    asked: Any = {
        **ASK,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    reply = client.chat.completions.create(**asked)
    content = reply.choices[0].logprobs and reply.choices[0].logprobs.content
    assert content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert len(reply.model_dump()["choices"][0]["token_ids"]) == len(content)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    counted = sum(len(c.model_dump().get("token_ids") or ()) for k in chunks for c in k.choices)
    seen = sum(len(c.logprobs.content or ()) for k in chunks for c in k.choices if c.logprobs)
    assert counted == seen == 5


async def test_concurrent_calls_of_one_trajectory_get_numbers_of_their_own(
    start_gateway: StartGateway, broker: Broker
) -> None:
    """Also where they come through two gateway replicas."""
    first = start_gateway()
    second = start_gateway(folder="run")
    opened = first.open(id="busy")
    async with openai.AsyncOpenAI(api_key=opened["api_key"], base_url=first.url + "/v1") as one:
        two = one.with_options(base_url=second.url + "/v1")

        async def call(client: openai.AsyncOpenAI) -> None:
            await client.chat.completions.create(**{**ASK, "max_tokens": 2})

        async with anyio.create_task_group() as tg:
            for number in range(12):
                tg.start_soon(call, two if number % 3 == 0 else one)
    done = await anyio.to_thread.run_sync(lambda: second.complete("busy", reward=1.0))
    assert done.json()["exchanges"] == 12
    assert [e.seq for e in await exchanges(broker, "busy")] == list(range(12))
    with pytest.raises(openai.ConflictError, match="completed"):
        first.agent(opened, max_retries=0).chat.completions.create(**ASK)


async def test_a_killed_log_is_a_delay_and_not_a_failure(
    gateway: GatewayProcess, nats_server: NatsServer, broker: Broker
) -> None:
    opened = gateway.open(id="wait")
    async with openai.AsyncOpenAI(
        base_url=opened["base_url"], api_key=opened["api_key"], max_retries=0, timeout=60
    ) as client:
        await client.chat.completions.create(**ASK)
        nats_server.kill()
        call = asyncio.ensure_future(client.chat.completions.create(**ASK))
        await anyio.to_thread.run_sync(nats_server.start)
        await call
        await client.chat.completions.create(**ASK)
    assert (await anyio.to_thread.run_sync(lambda: gateway.complete("wait"))).json()["exchanges"] == 3
    assert [e.seq for e in await exchanges(broker, "wait")] == [0, 1, 2]


async def test_a_client_that_leaves_is_recorded_as_that(gateway: GatewayProcess, broker: Broker) -> None:
    """A client that is starved of processor time may leave only after the whole answer was sent: it tries again
    then."""
    asked: Any = {**ASK, "max_tokens": 200, "n": 32, "extra_body": {"ignore_eos": True}}
    for attempt in range(30):
        name = f"left-{attempt}"
        client = gateway.agent(gateway.open(id=name))
        with client.chat.completions.create(**asked, stream=True) as stream:
            next(chunk for chunk in stream if any(c.delta.content for c in chunk.choices))
        done = await anyio.to_thread.run_sync(partial(gateway.complete, name, outcome="no_result"))
        events = await exchanges(broker, name)
        if any(len(e.sampled_ids) < 4 * 200 for e in events):
            break
    answer = done.json()
    assert {name: answer[name] for name in ("outcome", "reward", "exchanges", "calls")} == {
        "outcome": "no_result",
        "reward": None,
        "exchanges": len(events),
        "calls": 1,
    }
    assert answer["sampled_tokens"] == sum(len(e.sampled_ids) // 4 for e in events)
    assert {(e.seq, e.status) for e in events} == {(0, "cancelled")}
    assert all(len(e.sampled_ids) == len(e.logprobs) for e in events)
    assert any(e.sampled_ids for e in events)


async def test_opening_again_is_answered_alike(gateway: GatewayProcess) -> None:
    first = gateway.open(id="same", group="g")
    assert gateway.open(id="same", group="g") == first
    refused = httpx.post(f"{gateway.url}/v1/trajectories", json={"model": "tictactoe", "id": "same", "group": "h"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "trajectory_exists")
    assert httpx.get(f"{gateway.url}/v1/trajectories/same").json()["status"] == "open"


async def test_a_run_has_the_metadata_of_its_opening_and_of_its_completion(
    gateway: GatewayProcess, broker: Broker
) -> None:
    """Its completion's event too: reward functions are given what that holds."""

    def metadata() -> object:
        return httpx.get(f"{gateway.url}/v1/trajectories/both").json()["metadata"]

    gateway.open(id="both", metadata={"subject": "user-17", "try": 1})
    assert metadata() == {"subject": "user-17", "try": 1}
    for _ in range(2):
        assert gateway.complete("both", metadata={"try": 2}).status_code == 200
    assert metadata() == {"subject": "user-17", "try": 2}
    (completed,) = await broker.read(TrajectoryCompleted)
    assert msgspec.json.decode(completed.event.metadata) == {"subject": "user-17", "try": 2}
    assert gateway.complete("both", metadata={"try": 3}).status_code == 409
