"""What an agent sees and the record says when a provider fails, and when the gateway is killed."""

import json
import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx
import openai
import pytest

from pipeline import streams
from pipeline.config import OutsideConfig
from pipeline.log.broker import Broker
from rollout_gateway.outside import providers
from tests.conftest import free_port
from tests.kits.waiting import until, until_true
from tests.rollout_gateway.kit import exchanges
from tests.rollout_gateway.outside.conftest import KEY, StartOutside, table
from tests.rollout_gateway.outside.provider import Provider, Reply, chunks, completion, stream, whole

ASK: Any = {"model": "master", "messages": [{"role": "user", "content": "hi"}]}
_ERROR = {"error": {"message": f"slow down, {KEY}", "type": "rate_limit_error"}}
_GONE = httpx.RemoteProtocolError


def ask(url: str, streamed: bool, **headers: str) -> tuple[int, bytes]:
    """The status and all that came, with `!` where the connection broke."""
    got, body = b"", {**ASK, "stream": streamed, "stream_options": None}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=headers, timeout=30) as reply:
        try:
            for part in reply.iter_raw():
                got += part
        except _GONE:
            got += b"!"
        return reply.status_code, got


SAME: dict[str, tuple[Reply, bool, str]] = {
    "429": (Reply(429, [b'{"error": "later"}'], headers={"retry-after": "7"}), False, "the provider answered 429"),
    "400": (whole({"error": {"message": "bad"}}, status=400), True, "the provider answered 400"),
    "page": (Reply(503, [b"<html>busy"], "text/html"), False, "the provider answered 503"),
    "wrong JSON": (Reply(200, [b'{"choices": 7}']), False, "the answer can't be read: TypeError"),
    "no JSON": (Reply(200, [b"{"]), False, "the answer can't be read: DecodeError"),
    "wrong chunk": (stream(*chunks()[:3], b"data: {nonsense\n\n", *chunks()[3:]), True, "the answer can't be read"),
    "error chunk": (stream(*chunks()[:3], _ERROR | {"error": {"message": "overloaded"}}), True, "overloaded"),
    "stream broken": (stream(*chunks()[:3], ends=False), True, "the stream broke off"),
    "stream cut": (stream(*chunks()[:3]), True, "the stream ended before its last event"),
}


async def test_agent_sees_what_a_direct_call_shows_and_the_record_says_why(
    start_outside: StartOutside, provider: Provider, broker: Broker
) -> None:
    gateway = start_outside(table(provider))
    for name, (reply, streamed, error) in SAME.items():
        run = gateway.open(model="master")
        provider.says(reply)
        direct = ask(provider.url, streamed)
        through = ask(run["base_url"], streamed, authorization=f"Bearer {run['api_key']}")
        assert through == direct, name
        (event,) = await exchanges(broker, run["id"])
        assert (event.status, error in event.error) == ("failed", True), (name, event.error)
        assert event.cost_usd is None or name == "wrong chunk"
    provider.says(SAME["429"][0])
    with pytest.raises(openai.RateLimitError) as limited:
        gateway.client(max_retries=0).chat.completions.create(**ASK)
    assert limited.value.response.headers["retry-after"] == "7"


async def test_provider_that_can_not_be_reached_or_is_too_slow(
    start_outside: StartOutside, provider: Provider, second_provider: Provider, broker: Broker
) -> None:
    """A call that a provider may have got goes to no other one, as it may be paid."""
    gateway = start_outside(
        table(provider, url=f"http://127.0.0.1:{free_port()}/v1"),
        table(provider, name="slow", timeout_s=0.3),
        table(provider, name="breaking"),
        *(table(second_provider, name=name) for name in ("slow", "breaking")),
    )
    provider.says(Reply(200, [5.0, b"{}"]), Reply(200, [b'{"id":', None]))
    for name, code, error in (
        ("master", 502, "can't be reached"),
        ("slow", 504, "outside.timeout_s"),
        ("breaking", 502, "ended the connection"),
    ):
        run = gateway.open(model=name)
        reply = httpx.post(f"{run['base_url']}/chat/completions", json={**ASK, "model": name}, timeout=30)
        assert reply.status_code == code, name
        (event,) = await exchanges(broker, run["id"])
        assert (event.status, error in event.error) == ("failed", True), (name, event.error)
    assert (len(provider.got), second_provider.got) == (2, []), "no call comes to a provider twice"


async def test_second_provider_of_the_name_is_asked_and_the_record_says_so(
    start_outside: StartOutside, provider: Provider, second_provider: Provider, broker: Broker
) -> None:
    down = f"http://127.0.0.1:{free_port()}/v1"
    gateway = start_outside(table(provider, url=down), table(provider), table(second_provider, model="other"))
    second_provider.says(whole(completion()))
    run = gateway.open(model="master")
    for status, asked in ((503, 1), (429, 2), (400, 2)):
        provider.says(whole({}, status=status))
        reply = httpx.post(f"{run['base_url']}/chat/completions", json=ASK, timeout=30)
        assert reply.status_code == (400 if status == 400 else 200)
        assert len(second_provider.got) == asked
    assert second_provider.got[0].json["model"] == "other"
    first, second, refused = await exchanges(broker, run["id"])
    assert first.failed_providers == (
        f"{down}: The provider of 'master' can't be reached.",
        f"{provider.url}: The provider of 'master' answered 503",
    )
    assert (first.replica, first.status) == (second_provider.url, "complete")
    assert second.failed_providers[1].endswith("answered 429")
    assert (refused.replica, len(refused.failed_providers)) == (provider.url, 1)


async def test_reply_that_no_client_can_get_is_a_502_and_recorded(start_outside: StartOutside, broker: Broker) -> None:
    replies = {
        b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}": "its status is 999",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n": "its status is 101",
        b"HTTP/1.1 200 OK\r\nx-a: \x01\r\ncontent-length: 2\r\n\r\n{}": "",
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}": "it is compressed ('gzip')",
        b"HTTP/1.1 200 OK\r\ncontent-length: 70000000\r\n\r\n" + bytes(70_000_000): "it is longer than 64 MiB",
    }
    waiting = list(replies)

    async def reply(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            with suppress(anyio.BrokenResourceError):
                await stream.send(waiting.pop(0))

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, reply)
        url = f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}/v1"
        only = OutsideConfig(name="master", url=url)
        gateway = await anyio.to_thread.run_sync(lambda: start_outside(only))
        run = await anyio.to_thread.run_sync(lambda: gateway.open(model="master"))
        headers = {"authorization": f"Bearer {run['api_key']}"}
        for error in replies.values():
            status, body = await anyio.to_thread.run_sync(lambda: ask(run["base_url"], False, **headers))
            assert (status, error in json.loads(body)["error"]["message"]) == (502, True), (error, body)
        tasks.cancel_scope.cancel()
    events = await exchanges(broker, run["id"])
    assert [event.status for event in events] == ["failed"] * len(replies)
    assert all(error in event.error for error, event in zip(replies.values(), events, strict=True))


async def test_counts_are_calls_of_the_gateways_limit_with_the_providers_headers(
    start_outside: StartOutside, provider: Provider
) -> None:
    provider.says(Reply(200, [1.0, b"{}"], headers={"x-ratelimit-remaining": "7"}))
    gateway = start_outside(table(provider, dialect="messages"), max_calls=1)
    replies = list[httpx.Response]()

    async def count() -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            replies.append(await client.post(f"{gateway.url}/v1/messages/count_tokens", json=ASK))

    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(count)
    assert [reply.status_code for reply in replies] == [429, 200]
    assert replies[1].headers["x-ratelimit-remaining"] == "7"


@pytest.mark.parametrize("form", ["{}", "\\u002d", "\\\\u002D"])
def test_key_with_escapes_is_hidden(provider: Provider, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setenv("TEST_PROVIDER_KEY", "sk-a/b")
    hide = providers.Provider(table(provider)).hide_key
    shown = "sk-a/b".replace("-", form).replace("/", "\\/") if form != "{}" else "sk-a/b"
    said = b'{"a": "\\u00e4 \\"x", "b": "your key %b is bad"}' % shown.encode()
    hidden = hide(said)
    assert json.loads(hidden)["a"] == 'ä "x'
    assert b"[provider's key]" in hidden
    assert b"sk" not in hidden


async def test_agent_that_leaves_is_recorded_and_ends_the_providers_stream(
    start_outside: StartOutside, provider: Provider, broker: Broker
) -> None:
    gateway = start_outside(table(provider))
    run = gateway.open(model="master")
    provider.says(stream(*message_and_pause()))
    with httpx.stream("POST", f"{run['base_url']}/chat/completions", json={**ASK, "stream": True}) as reply:
        next(reply.iter_raw())
    events = await until(partial(exchanges, broker, run["id"]))
    assert (events[0].status, events[0].error) == ("cancelled", "the agent left before the end")
    assert b"the" in events[0].response
    await until_true(lambda: provider.broke)


def message_and_pause() -> list[Any]:
    return [*chunks()[:3], 20.0, *chunks()[3:]]


async def test_killed_gateway_sends_nothing_twice_and_loses_nothing_that_was_answered(
    start_outside: StartOutside, provider: Provider, broker: Broker
) -> None:
    """In the middle of a stream nothing is recorded or repeated. Behind the record, before the answer's end, the
    client's retry is answered from the log."""
    gateway = start_outside(table(provider))
    gateway.restart(crash_at="gateway.before_answer:2")
    run = gateway.open(model="master")
    provider.says(stream(*chunks()))
    key = {"authorization": f"Bearer {run['api_key']}"}
    assert ask(run["base_url"], True, **key)[1].endswith(b"data: [DONE]\n\n")
    assert ask(run["base_url"], True, **key)[1].endswith(b"!"), "killed behind the record"
    gateway.wait()
    assert len(provider.got) == len(await exchanges(broker, run["id"])) == 2
    gateway.start()
    retried = ask(run["base_url"], True, **key, **{"x-stainless-retry-count": "1"})
    assert retried[1].endswith(b"data: [DONE]\n\n")
    assert len(provider.got) == 2

    provider.says(stream(*message_and_pause()))
    killer = threading.Timer(1.0, gateway.kill)
    killer.start()
    assert await anyio.to_thread.run_sync(lambda: ask(run["base_url"], True, **key)[1].endswith(b"!"))
    killer.join()
    gateway.start()
    assert (len(provider.got), len(await exchanges(broker, run["id"]))) == (3, 2)
    assert gateway.complete(run["id"], reward=1.0).json()["exchanges"] == 2


async def test_providers_key_is_in_no_answer_no_message_of_the_log_and_no_file(
    start_outside: StartOutside, provider: Provider, broker: Broker, tmp_path: Path
) -> None:
    """A provider repeats its key, in bodies, streams and headers. Store and backups copy the log and the installation's
    folder."""
    gateway = start_outside(table(provider), **{"detection.enabled": True})
    run = gateway.open(model="master")
    leaks = {"headers": {"x-key": KEY}}
    for reply, streamed in (
        (whole(_ERROR, status=401, **leaks), False),
        (whole(completion(KEY), **leaks), False),
        (stream(*chunks(f"a {KEY} b")), True),
        (Reply(500, [KEY.encode()], "text/plain"), False),
        (Reply(401, [json.dumps(_ERROR).replace("-", "\\u002d").encode()]), False),
        (stream(*chunks(), KEY[:9].encode(), 0.2, KEY[9:].encode()), True),
    ):
        provider.says(reply)
        _, body = ask(run["base_url"], streamed, authorization=f"Bearer {run['api_key']}")
        assert KEY.encode() not in body.replace(b"\\u002d", b"-")
    assert all(got.headers["authorization"] == f"Bearer {KEY}" for got in provider.got)
    ask(f"{gateway.url}/v1", False)
    gateway.stop()
    assert len(await exchanges(broker, run["id"])) == 6
    for of_log in streams.STREAMS:
        assert not [m async for m in broker.messages(of_log.name) if KEY.encode() in m.payload]
    files = [Path(folder) / name for folder, _, names in os.walk(tmp_path) for name in names]
    assert any(KEY.encode() in path.read_bytes() for path in files) is False
    assert {path.name for path in files} >= {"config.toml", "gateway.log"}
