"""Limits on time, concurrent calls and body sizes: each has a setting, an error of its own, and a correct record."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, Mock

import anyio
import httpx
import openai
import pytest

from pipeline.log.broker import Broker
from rollout_gateway.access.api_keys import Access
from rollout_gateway.capture.exchange import Caller as CallOf
from rollout_gateway.dialects.calls import CHAT, Call
from rollout_gateway.http.errors import ApiError
from rollout_gateway.model_calls import _READERS, ModelCalls, ModelRequest
from rollout_gateway.outside.relay import NotAnsweredError
from tests.conftest import VllmServer
from tests.kits.waiting import until_true
from tests.rollout_gateway.access.test_access import LET_IN, Caller
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.kit import ASK, counted, exchanges, key_config


@pytest.mark.vllm
async def test_a_call_past_its_deadline_is_a_504_and_stops_the_server(
    start_gateway: StartGateway, broker: Broker, vllm_server: VllmServer
) -> None:
    httpx.post(f"{vllm_server.url}/v1/completions", json={"model": "tictactoe@0", "prompt": "a"}, timeout=120)
    gateway = start_gateway(**{"replicas.timeout_s": 0.2})
    before = counted(vllm_server, "generation_tokens_total")
    client = gateway.agent(gateway.open(id="slow"), max_retries=0)
    # Deadlines are looked for four times a second.
    slow: Any = {**ASK, "max_tokens": 240, "n": 128, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**slow)
    assert (refused.value.status_code, refused.value.code) == (504, "upstream_timeout")
    with pytest.raises(openai.APIError) as broken:
        list(client.chat.completions.create(**slow, stream=True))
    assert broken.value.code == "upstream_timeout"
    events = await exchanges(broker, "slow")
    assert {(e.seq, e.status, e.policy_version) for e in events} == {(seq, "failed", "tictactoe@0") for seq in (0, 1)}
    assert events[0].sampled_ids == b""
    assert all(len(e.sampled_ids) == len(e.logprobs) < 4 * 240 for e in events[1:])
    assert gateway.complete("slow", outcome="no_result").json()["exchanges"] == len(events)
    await until_true(lambda: not counted(vllm_server, "num_requests_running"))
    sampled = counted(vllm_server, "generation_tokens_total") - before
    assert before > 0  # the figure is there: a busy server may have sampled nothing within the deadline
    assert sampled < 2 * 128 * 240 / 2


async def begun(server: FakeVllm, client: openai.AsyncOpenAI) -> asyncio.Future[list[Any]]:
    """Two calls of a client that the server holds, as it does all calls until its `held` is set."""
    server.held = asyncio.Event()
    calls = asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(2)))
    await server.called(2)
    return calls


async def test_calls_beyond_the_bound_are_told_to_wait(start_gateway_alone: StartGateway, fake_vllm: FakeVllm) -> None:
    gateway = start_gateway_alone(urls=(fake_vllm.url,), max_calls=2)
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        calls = await begun(fake_vllm, client)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(**ASK)
        assert refused.value.code == "too_many_calls"
        assert refused.value.response.headers["retry-after"] == "1"
        async with httpx.AsyncClient(base_url=gateway.url) as control:
            claude = await control.post("/v1/messages", json={"model": "tictactoe", "messages": []})
            assert (claude.status_code, claude.json()["error"]["type"]) == (429, "rate_limit_error")
            assert (await control.get("/health")).status_code == 200
        patient = client.with_options(max_retries=60).chat.completions.create(**ASK)
        waiting = asyncio.ensure_future(patient)
        fake_vllm.held.set()  # type: ignore[union-attr]  # `begun` made it
        assert all(reply.choices for reply in [*await calls, await waiting])


async def test_calls_that_take_long_hold_up_their_own_key_alone(
    start_gateway_alone: StartGateway, fake_vllm: FakeVllm
) -> None:
    keys = (key_config("alice"), key_config("bob"))
    gateway = start_gateway_alone(urls=(fake_vllm.url,), max_calls=2, keys=keys)
    opened = Caller(gateway, "alice").open()
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="alice", max_retries=0) as alice:
        calls = await begun(fake_vllm, alice)
        # A run's own key counts as the key that opened the run.
        for client in (alice, alice.with_options(api_key=opened["api_key"])):
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(**ASK)
        taken = asyncio.ensure_future(alice.with_options(api_key="bob").chat.completions.create(**ASK))
        await fake_vllm.called(3)
        assert not calls.done()
        fake_vllm.held.set()  # type: ignore[union-attr]
        assert all(reply.choices for reply in [*await calls, await taken])


def test_a_body_beyond_the_bound_is_refused(start_front: StartGateway) -> None:
    gateway = start_front(**{"http.max_body_bytes": 10_000})
    large = json.dumps({**ASK, "messages": [{"role": "user", "content": "x" * 10_000}]}).encode()

    def chunks() -> Iterator[bytes]:
        for start in range(0, len(large), 1000):
            yield large[start : start + 1000]

    def refusal(path: str, content: Any) -> tuple[int, Any]:
        reply = httpx.post(f"{gateway.url}{path}", content=content, timeout=60)
        return reply.status_code, reply.json()["error"]

    for path in ("/v1/chat/completions", "/v1/responses", "/v1/trajectories", "/t/x/v1/completions"):
        for content in (large, chunks()):
            status, error = refusal(path, content)
            assert (status, error["code"]) == (413, "body_too_large")
    status, error = refusal("/v1/messages", large)
    assert (status, error["type"]) == (413, "request_too_large")
    let_in = httpx.post(f"{gateway.url}/v1/chat/completions", json=ASK, timeout=60)
    assert (let_in.status_code, let_in.json()["error"]["code"]) == (LET_IN, "no_replica")


async def test_what_a_call_adds_to_the_log_counts_as_further_calls_of_its_key(
    start_gateway_alone: StartGateway, fake_vllm: FakeVllm, broker: Broker
) -> None:
    keys = (key_config("large", calls_per_minute=6), key_config("small", calls_per_minute=6))
    gateway = await anyio.to_thread.run_sync(lambda: start_gateway_alone(urls=(fake_vllm.url,), keys=keys))

    async def called(key: str, *texts: str) -> list[int]:
        run = await anyio.to_thread.run_sync(lambda: Caller(gateway, key).open(id=key))
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as client:
            return [await call(client, run["api_key"], text) for text in texts]

    async def call(client: httpx.AsyncClient, token: str, text: str) -> int:
        body = {"model": "tictactoe", "messages": [{"role": "user", "content": text}]}
        headers = {"authorization": f"Bearer {token}"}
        return (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code

    assert await called("large", "x" * (12 << 20), "x") == [200, 429]
    # The log holds what is repeated once.
    assert await called("small", *("y" * 900_000 + str(n) for n in range(4))) == [200] * 4
    assert len(await exchanges(broker, "small")) == 4


def test_a_large_body_is_paid_for_before_it_is_read(start_front: StartGateway) -> None:
    """By the key, or the key behind a run's token, whether or not the body can be used, and however it is sent."""
    chat, claude = "/v1/chat/completions", "/v1/messages"
    keys = [key_config(name, calls_per_minute=6) for name in ("plain", "chunked", "small", "counting", "run")]
    gateway = start_front(keys=keys)
    large = json.dumps({"model": "tictactoe", "unknown": "x" * (8 << 20), "messages": []}).encode()

    def statuses(key: str, path: str, body: Any, times: int, token: bool) -> list[int]:
        used = Caller(gateway, key).open(id=f"{key}-run")["api_key"] if token else key
        headers = {"authorization": f"Bearer {used}"}
        with httpx.Client(base_url=gateway.url, timeout=60, headers=headers) as client:
            return [client.post(path, content=body()).status_code for _ in range(times)]

    def whole() -> bytes:
        return large

    def chunks() -> Iterator[bytes]:
        yield from (large[i : i + (1 << 20)] for i in range(0, len(large), 1 << 20))

    assert statuses("plain", chat, whole, 3, token=True) == [400, 429, 429]
    assert statuses("chunked", claude, chunks, 3, token=False) == [400, 429, 429]
    assert statuses("counting", "/tokenize", chunks, 3, token=False)[1:] == [429, 429]
    assert statuses("run", "/v1/messages/count_tokens", chunks, 3, token=True)[1:] == [429, 429]
    assert statuses("small", chat, lambda: b'{"unknown": 1}', 4, token=True) == [400] * 4
    # After a restart the run of the token is not in memory.
    gateway.restart()
    token = Caller(gateway, "small").open(id="late")["api_key"]
    gateway.restart()
    with httpx.Client(base_url=gateway.url, timeout=60, headers={"authorization": f"Bearer {token}"}) as client:
        assert [client.post(chat, content=large).status_code for _ in range(2)] == [400, 429]


async def test_a_large_body_is_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[bool] = []

    def read(body: bytes) -> Call:
        beside.append(threading.current_thread() is not threading.main_thread())
        raise ApiError(400, "invalid_body", "refused")

    monkeypatch.setitem(_READERS, CHAT, read)
    gateway = Mock()
    gateway.router.has_prompts.return_value = False
    gateway.relay.read.return_value = None  # no outside model
    calls = ModelCalls(gateway)
    for size in (10, 1 << 20):
        asked = ModelRequest(Mock(body=b"x" * size, started=False), Access(), CHAT, "")
        with pytest.raises(ApiError, match="refused"):
            await calls.answer(asked)
        # The same body again, for an apprentice.
        with pytest.raises(NotAnsweredError, match="refused"):
            await calls._ask_apprentice(asked, MagicMock(), CallOf(Mock()))
    assert beside == [False, False, True, True]
