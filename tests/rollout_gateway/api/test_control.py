"""Decisions about versions over HTTP, at several gateways."""

from typing import Any

import httpx
import pytest

from pipeline.events import PolicyPromoted
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway, publish_adapter
from tests.rollout_gateway.kit import ASK, error, serves

pytestmark = pytest.mark.inference


async def decide(gateway: GatewayProcess, action: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{gateway.url}/v1/policies/tictactoe/{action}", json=body)


async def test_an_idempotency_id_stands_for_one_decision_which_holds_at_every_gateway(
    start_gateway: StartGateway, broker: Broker
) -> None:
    gateway = start_gateway()
    await publish_adapter(broker, 1)
    await serves(gateway, "tictactoe@1")
    assert error(await decide(gateway, "rollback")) == (409, "no_decision")
    for version in ("tictactoe@0", "tictactoe@1"):
        await decide(gateway, "promote", version=version)
    for _ in range(2):  # the repeat takes back nothing more
        reply = await decide(gateway, "rollback", request="r1")
        assert (reply.status_code, reply.json()["version"]) == (200, "tictactoe@0")
    refused = await decide(gateway, "promote", version="tictactoe@1", request="r1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_exists")
    assert "Nothing was recorded" in refused.json()["error"]["message"]
    events = [r.event for r in await broker.read(PolicyPromoted)]
    assert [e.action for e in events] == ["promote", "promote", "rollback"]
    await publish_adapter(broker, 2)
    other = start_gateway(folder="other")
    for pinned in (other, gateway):
        await serves(pinned, "tictactoe@0")
    assert gateway.client().chat.completions.create(**ASK).model == "tictactoe@0"
    await decide(other, "follow")
    for following in (other, gateway):
        await serves(following, "tictactoe@2")
