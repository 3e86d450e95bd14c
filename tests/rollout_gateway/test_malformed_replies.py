"""An inference server that answers with malformed JSON, and clients that send odd messages: each call ends in an answer
or an error, and the gateway goes on."""

import json
from typing import Any

import anyio.to_thread
import httpx
import pytest

from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.kit import ASK, exchanges

MESSAGE = {"role": "assistant", "content": "hi"}
CHOICE = {
    "index": 0,
    "message": MESSAGE,
    "finish_reason": "stop",
    "token_ids": [7],
    "logprobs": {"content": [{"logprob": -0.5}]},
}


def reply(**changed: Any) -> bytes:
    body = {"id": "chatcmpl-1", "model": "tictactoe@0", "choices": [CHOICE], "prompt_token_ids": [1, 2], **changed}
    return json.dumps(body).replace('"1e400"', "1e400").encode()


def stream(*events: Any) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tictactoe@0"}
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None}]}
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    lines = (json.dumps({**head, **event}) for event in (first, *events, last))
    return b"".join(b"data: %b\n\n" % line.replace('"1e400"', "1e400").encode() for line in lines) + b"data: [DONE]\n\n"


MALFORMED = (
    reply(usage={"prompt_tokens": "1e400"}),
    reply(usage=5),
    reply(choices=[CHOICE] * 5000),
    reply(choices=[]),
    reply(choices=[CHOICE | {"message": MESSAGE | {"tool_calls": 5}}]),
    reply(choices=[CHOICE | {"message": None}]),
    reply(created="1e400"),
    reply(choices=[CHOICE | {"finish_reason": ["stop"]}]),
    b"[]",
    b"",
    b"{}",
    b"[" * 10_000,
)
MALFORMED_EVENTS = (
    {"usage": {"prompt_tokens": "1e400"}},
    {"usage": 5},
    {"choices": 5},
    {"choices": [{"index": "1e400", "delta": {}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": 5}}]},
    {"choices": [{"index": 7, "delta": {"content": "b"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": ["stop"]}]},
    {"x": "1e400"},
    {"error": 5},
)


class Scripted(FakeVllm):
    """Answers chat completions with `said`."""

    said = b""
    refuses_inline_system = False

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    async def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path not in ("/v1/chat/completions", "/tokenize"):
            return await super()._answer(path, body)
        self.asked.append(body["messages"])
        if self.refuses_inline_system and any(m["role"] == "system" for m in body["messages"][1:]):
            return 400, {"error": {"message": "System message must be at the beginning.", "code": 400}}
        return 200, {"count": 2, "tokens": [1, 2]} if path == "/tokenize" else self.said


@pytest.fixture
async def scripted() -> Any:
    server = Scripted()
    await server.start()
    yield server
    await server.stop()


async def started(start: StartGateway, server: Scripted, **settings: Any) -> GatewayProcess:
    server.said = reply()
    gateway = await anyio.to_thread.run_sync(lambda: start(urls=(server.url,), **settings))
    assert (await post(gateway, "/v1/chat/completions", ASK)).status_code == 200
    return gateway


async def post(gateway: GatewayProcess, path: str, body: Any, key: str = "none") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:
        content = body if isinstance(body, bytes) else json.dumps(body)
        return await client.post(path, content=content, headers=headers)


def asked(path: str, **more: Any) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"model": "tictactoe", "input": "go", **more}
    return {"model": "tictactoe", "max_tokens": 5, "messages": ASK["messages"], **more}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_malformed_reply_is_a_502_and_the_gateway_goes_on(
    start_gateway_alone: StartGateway, scripted: Scripted, broker: Broker, path: str
) -> None:
    gateway = await started(start_gateway_alone, scripted)
    opened = await anyio.to_thread.run_sync(gateway.open)
    for key in ("none", opened["api_key"]):  # not captured, and captured
        for said in MALFORMED:
            scripted.said = said
            answer = await post(gateway, path, asked(path), key)
            assert (answer.status_code, said[:300]) == (502, said[:300]), answer.text
            assert "can't be read" in answer.json()["error"]["message"]
        for event in MALFORMED_EVENTS:
            scripted.said = stream(event)
            answer = await post(gateway, path, asked(path, stream=True), key)
            assert answer.status_code == 200
            assert b"error" in answer.content, (event, answer.text)
        scripted.said = reply()
        assert (await post(gateway, path, asked(path), key)).status_code == 200
    recorded = await exchanges(broker, opened["id"])
    assert [e.status for e in recorded] == ["failed"] * len(MALFORMED + MALFORMED_EVENTS) + ["complete"]
    assert "internal_error" not in gateway.log
    assert "Traceback" not in gateway.log


async def test_inline_system_is_merged_where_the_template_refuses_it(
    start_gateway_alone: StartGateway, scripted: Scripted, broker: Broker
) -> None:
    gateway = await started(start_gateway_alone, scripted)
    opened = await anyio.to_thread.run_sync(gateway.open)
    body = asked("/v1/messages", system="You are Claude Code.")
    body["messages"] = [*body["messages"], {"role": "system", "content": "The date is today."}]
    merged = [{"role": "system", "content": "You are Claude Code.\nThe date is today."}, *ASK["messages"]]
    for refuses in (False, True):
        scripted.refuses_inline_system = refuses
        for stream_said in (False, True):
            scripted.said = stream() if stream_said else reply()
            answer = await post(gateway, "/v1/messages", body | {"stream": stream_said}, opened["api_key"])
            assert answer.status_code == 200
            assert (scripted.asked[-1] == merged) == refuses
        counted = await post(gateway, "/v1/messages/count_tokens", body, opened["api_key"])
        assert (counted.status_code, counted.json()) == (200, {"input_tokens": 2})
        assert (scripted.asked[-1] == merged) == refuses
    requests = [json.loads(e.request)["messages"] for e in await exchanges(broker, opened["id"])]
    assert [messages == merged for messages in requests] == [False, False, True, True]
