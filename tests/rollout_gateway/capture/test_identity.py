"""The trajectory of a call: by key and role, headers, body, detection; and pacing of groups."""

import time
from typing import Any

import httpx
import openai
import pytest

from pipeline.events import TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker
from tests.kits.events import checkpoint
from tests.kits.log import read_stream
from tests.kits.waiting import until
from tests.rollout_gateway.access.test_access import Caller
from tests.rollout_gateway.conftest import PROJECT, StartGateway
from tests.rollout_gateway.kit import ASK, error, exchanges, key_config


@pytest.mark.inference
async def test_a_key_is_in_no_log(start_gateway: StartGateway, broker: Broker) -> None:
    gateway = start_gateway(keys=(key_config("agent-key"),))
    opened = Caller(gateway, "agent-key").open(id="mine")
    for client in (gateway.agent(opened), gateway.client(api_key="agent-key")):
        client.chat.completions.create(**ASK)
    for key in ("agent-key-x", f"{opened['api_key'][:-4]}xxxx", opened["api_key"], "agent-key"):
        Caller(gateway, key).status("POST", "/v1/trajectories/mine/complete", {})
    assert "agent-key" not in gateway.log.replace('"agent-key"', "")
    assert opened["api_key"] not in gateway.log
    recorded = [r.event for r in await read_stream(broker, "ROLLOUTS")]
    assert [type(event) for event in recorded][-1] is TrajectoryCompleted
    assert not any(opened["api_key"].encode() in repr(event).encode() for event in recorded)


@pytest.mark.inference
async def test_a_call_may_name_and_open_its_trajectory(start_gateway: StartGateway, broker: Broker) -> None:
    gateway = start_gateway()
    headers = {"x-journeywork-trajectory": "h1", "x-journeywork-group": "g"}
    client = gateway.client(default_headers=headers)
    client.chat.completions.create(**ASK)
    client.chat.completions.create(**ASK)
    side = {"x-journeywork-side-call": "1"}
    gateway.client().chat.completions.create(
        **ASK, metadata={"journeywork_trajectory": "b1", "journeywork_group": "g"}, extra_headers=side
    )
    with pytest.raises(openai.NotFoundError):
        gateway.client().chat.completions.create(**ASK, metadata={"journeywork_trajectory": "b2"})
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**ASK, extra_headers={"x-journeywork-role": "%00"})
    assert [e.seq for e in await exchanges(broker, "h1")] == [0, 1]
    assert [(e.group, e.side_call) for e in await exchanges(broker, "b1")] == [("g", True)]


@pytest.mark.inference
async def test_groups_beyond_the_bound_are_told_to_wait(start_gateway: StartGateway, broker: Broker) -> None:
    gateway = start_gateway(max_groups_ahead=2)
    for group in ("g1", "g2", "g1"):
        gateway.open(group=group)
    body = {"model": "tictactoe", "group": "g3"}
    asked = time.monotonic()
    refused = httpx.post(f"{gateway.url}/v1/trajectories", json=body)
    assert (error(refused), refused.headers["retry-after"]) == ((429, "groups_ahead"), "1")
    told = time.monotonic()
    gateway.open(group="g3", split="val")
    await broker.publish(checkpoint(1, "tictactoe", project=PROJECT, groups=("g1",)))
    async with httpx.AsyncClient() as client:
        last: list[float] = []

        async def let_in() -> Any:  # as an agent that was told to wait
            last[:] = [time.monotonic()]
            answer = await client.post(f"{gateway.url}/v1/trajectories", json=body)
            return answer.json() if answer.status_code == 201 else None

        opened = await until(let_in)
    found = await broker.read_last(TrajectoryOpened)
    assert found is not None
    assert found.event.trajectory == opened["id"]
    # How long the group waited, from the refusal to the opening, can be asked for.
    assert last[0] - told <= found.event.paced_s < time.monotonic() - asked
