"""The control API: decisions about versions, watching them, groups, metrics."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from pipeline.events import PolicyPromoted
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import GatewayProcess, StartGateway, publish_adapter
from tests.rollout_gateway.kit import ASK, serves

pytestmark = [pytest.mark.anyio, pytest.mark.inference]


async def decide(gateway: GatewayProcess, action: str, **body: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{gateway.url}/v1/policies/tictactoe/{action}", json=body)


async def test_an_idempotency_id_stands_for_one_decision_which_holds_at_every_gateway(
    start_gateway: StartGateway, broker: Broker
) -> None:
    gateway = start_gateway()
    await publish_adapter(broker, 1)
    await serves(gateway, "tictactoe@1")
    refused = await decide(gateway, "rollback")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "no_decision")
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


async def test_groups_and_metrics(gateway: GatewayProcess) -> None:
    for number in range(3):
        gateway.open(id=f"m{number}", group="g1" if number else "g2")
    gateway.agent(gateway.open(id="m3", group="g1")).chat.completions.create(**ASK)
    get = httpx.Client(base_url=gateway.url)
    with get:
        results = [{"id": f"m{n}", "reward": n / 4} for n in (1, 2, 3)]
        done = get.post("/v1/groups/g1/complete", json={"trajectories": results})
        assert [t["reward"] for t in done.json()["data"]] == [0.25, 0.5, 0.75]
        assert get.post("/v1/groups/g1/complete", json={"trajectories": results}).json() == done.json()
        wrong = get.post("/v1/groups/g1/complete", json={"trajectories": [{"id": "m0"}]})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "wrong_group")
        twice = get.post("/v1/groups/g2/complete", json={"trajectories": [{"id": "m0"}, {"id": "m0"}]})
        assert (twice.status_code, twice.json()["error"]["code"]) == (400, "invalid_body")
        assert get.get("/v1/trajectories/m0").json()["status"] == "open"
        text = get.get("/metrics").text
        assert 'journeywork_calls_total{endpoint="/v1/chat/completions",status="200"} 1' in text
        assert "journeywork_replica_ready" in text
        assert get.get("/v1/models/tictactoe@0").json()["id"] == "tictactoe@0"
        assert get.get("/v1/models/nope").status_code == 404
        assert get.put("/v1/trajectories").headers["allow"] == "POST"
