"""Malformed bodies, headers and URLs: an error in OpenAI's format each, never a 5xx, never a hang, nothing lost."""

from __future__ import annotations

import json
import random
import socket
from typing import Any

import httpx
import pytest

from pipeline.log.broker import Broker
from rollout_gateway.app import _MODEL_CALLS
from tests.rollout_gateway.conftest import GatewayProcess
from tests.rollout_gateway.kit import ASK, exchanges

pytestmark = [pytest.mark.anyio, pytest.mark.vllm]

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    "",
    "\u0000",
    "\ud83d\ude00",
    "x" * 300,
    "a/b",
    "*.>",
    [],
    [None],
    [[]],
    {},
    {"a": None},
    {"role": 3},
    [{"role": "user"}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    {"type": "json_schema"},
]
FIELDS = (
    "model",
    "messages",
    "stream",
    "n",
    "logprobs",
    "tools",
    "tool_choice",
    "response_format",
    "metadata",
    "prompt",
    "input",
    "max_tokens",
    "stop",
    "id",
    "group",
    "reward",
    "rewards",
    "metrics",
    "outcome",
    "version",
    "percent",
    "split",
    "trajectories",
    "return_token_ids",
    "stream_options",
)
AUTHORIZATIONS = ("", "Bearer", "Bearer jwr-", "Bearer jwr-!!.x", "Basic eA==", "Bearer jwr-AAAA.x")
URLS = (
    *_MODEL_CALLS,
    *(f"/t/fuzz{path}" for path in _MODEL_CALLS),
    "/v1/trajectories",
    "/v1/trajectories/fuzz-x/complete",
    "/v1/groups/g/complete",
    "/v1/policies/tictactoe/split",
    "/v1/policies/nope/promote",
    "/v1/trajectories/%00",
    "/t//v1/chat/completions",
    "/t/%ff/v1/chat/completions",
    "/v1/models/%2f",
)


def bodies(source: random.Random, count: int) -> list[bytes]:
    out = []
    for _ in range(count):
        body = {name: source.choice(ODD) for name in source.sample(FIELDS, source.randint(0, 6))}
        if source.random() < 0.6:
            body["model"] = source.choice(("tictactoe", "tictactoe@0", "tictactoe@x", "@", "nope@1"))
        if source.random() < 0.3:
            body["messages"] = ASK["messages"]
        body["max_tokens"] = body.get("max_tokens", 2)
        data = json.dumps(body).encode()
        match source.randrange(6):
            case 0:
                data = data[: source.randrange(len(data) + 1)]
            case 1:
                at = source.randrange(len(data))
                data = data[:at] + source.randbytes(3) + data[at:]
        out.append(data)
    return out


async def test_a_thousand_malformed_requests(gateway: GatewayProcess, broker: Broker) -> None:
    source = random.Random(4)
    opened = gateway.open(id="fuzz")
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        for number, data in enumerate(bodies(source, 1000)):
            url = source.choice(URLS)
            headers = {
                "content-type": source.choice(("application/json", "text/plain", "x")),
                "authorization": source.choice(AUTHORIZATIONS),
                "traceparent": source.choice(("", "00-xyz", "0" * 55)),
                "x-stainless-retry-count": source.choice(("0", "1", "x")),
            }
            headers = {k: v for k, v in headers.items() if source.random() < 0.3}
            method = source.choice(("POST", "POST", "POST", "POST", "GET", "DELETE"))
            reply = client.request(method, url, content=data if method == "POST" else None, headers=headers)
            statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
            assert reply.status_code < 500, (number, method, url, data, reply.text)
            if reply.status_code >= 400:
                assert reply.json()["error"]["message"], (url, data, reply.text)
    assert statuses[400] > 200
    with socket.create_connection(("127.0.0.1", gateway.config.gateway.port)) as raw:
        raw.sendall(b"GET / HTTP/9.9\r\n\x00\xff: \r\n\r\n")
        raw.settimeout(60)
        assert b" 400 " in raw.recv(1000)
    client = gateway.agent(opened)
    client.chat.completions.create(**ASK)
    recorded = await exchanges(broker, "fuzz")
    assert recorded[-1].status == "complete"
    assert gateway.complete("fuzz").json()["exchanges"] == len(recorded)
    assert "Exception in ASGI" not in gateway.log
