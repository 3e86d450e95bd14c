"""Helpers of the gateway's tests: requests, reads of the log, and waits."""

import hashlib
import re
import sys
from typing import Any

import httpx

from pipeline.config import KeyConfig
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import Registry
from tests.conftest import VllmServer
from tests.kits.waiting import until
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess

ASK: Any = {
    "model": "tictactoe",
    "max_tokens": 5,
    "temperature": 1.0,
    "messages": [{"role": "user", "content": "a1=x b2=o"}],
}


TOKENS = TrajectoryTokens(b"0" * 32, "p")


def registry_of(broker: Broker) -> Registry:
    """The runs of a gateway of its own, of project `p` as `tests.kits.events` makes them."""
    return Registry(broker, "p", TOKENS)


async def exchanges(broker: Broker, trajectory: str) -> list[ExchangeRecorded]:
    recorded = await broker.read(ExchangeRecorded, project=PROJECT, trajectory=trajectory)
    return [r.event for r in recorded]


async def serves(gateway: GatewayProcess, version: str) -> None:
    """Until `tictactoe` stands for `version`."""
    async with httpx.AsyncClient(timeout=60) as client:

        async def does() -> bool:  # there is no event for "routed", which is what is asked here
            (policy,) = (await client.get(f"{gateway.url}/v1/policies")).json()["data"]
            return bool(policy["version"] == version)

        await until(does)


Calls = list[tuple[float, float, int]]
"""When each call began and ended, by one clock, and the step that answered it."""


def older_than_before(calls: Calls) -> Calls:
    """Return the calls that were answered by an older step than a call that had ended when they began."""
    ended = sorted((end, step) for _, end, step in calls)
    newest, position, older = 0, 0, []
    for begin, end, step in sorted(calls):
        while position < len(ended) and ended[position][0] <= begin:
            newest = max(newest, ended[position][1])
            position += 1
        if step < newest:
            older.append((begin, end, step))
    return older


def counted(server: VllmServer, name: str) -> float:
    """A figure of vLLM's own metrics, over all models."""
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


def key_config(key: str, **options: Any) -> KeyConfig:
    return KeyConfig(sha256=hashlib.sha256(key.encode()).hexdigest(), **{"name": key, **options})


def error(reply: httpx.Response) -> tuple[int, str]:
    """The status of a reply, and the code of its error."""
    return reply.status_code, reply.json()["error"]["code"] if reply.status_code >= 400 else ""


def direct(server: VllmServer, **body: Any) -> dict[str, Any]:
    """The answer to the same call, straight from vLLM, with everything it can say."""
    body = {**ASK, **body, "model": "tictactoe@0", "logprobs": True, "return_token_ids": True}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def of_servers(metrics: str, what: str) -> list[float]:
    """What a gateway's metrics say of each inference server."""
    return [float(n) for n in re.findall(rf"^journeywork_replica_{what}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE)]


async def in_flight(gateway: GatewayProcess, least: int, most: int = sys.maxsize) -> None:
    """Wait until the gateway has so many calls at its inference servers."""
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        async def has() -> bool:
            return least <= sum(of_servers((await client.get("/metrics")).text, "calls")) <= most

        await until(has)
