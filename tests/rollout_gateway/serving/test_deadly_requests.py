"""A request that kills its inference server, which is a real process here: it is refused, and the others go on."""

from __future__ import annotations

import anyio
import anyio.to_thread
import httpx
import openai
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.deadly_requests import DeadlyRequests
from rollout_gateway.serving.replicas import Replica
from tests.rollout_gateway.conftest import StartGateway
from tests.rollout_gateway.kit import Mortal, asking, exchanges, in_flight

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("how", ["die", "die slowly"])
@pytest.mark.slow
async def test_a_request_that_kills_twice_is_refused_and_recorded(
    start_gateway_alone: StartGateway, nats_config: NatsConfig, how: str
) -> None:
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,))
        gateway.open(id="deadly")
        gateway.open(id="good")
        deadly = gateway.agent({"base_url": f"{gateway.url}/t/deadly/v1", "api_key": "none"})
        good = gateway.agent({"base_url": f"{gateway.url}/t/good/v1", "api_key": "none"}, max_retries=0)
        assert good.chat.completions.create(**asking("hello")).choices
        with pytest.raises(openai.APIStatusError) as refused:
            deadly.chat.completions.create(**asking(how, seed=1))
        assert (refused.value.status_code, refused.value.code) == (502, "deadly_request")
        assert "in flight at 2 crashes" in refused.value.message
        assert server.died(2)
        assert good.chat.completions.create(**asking("hello again")).choices
        # The same again is not sent; another body is.
        with pytest.raises(openai.APIStatusError, match="in flight at 2 crashes"):
            deadly.chat.completions.create(**asking(how, seed=1))
        assert deadly.chat.completions.create(**asking("fine")).choices
        assert server.died(2)
        async with Broker.connect(nats_config) as broker:
            events = await exchanges(broker, "deadly")
            others = await exchanges(broker, "good")
        assert [(e.status, e.policy_version, e.sampled_ids) for e in events[:1]] == [
            ("failed", "tictactoe@0", b"")
        ]
        assert [e.status for e in events[1:]] == ["complete"]
        assert [e.status for e in others] == ["complete"] * 2
        gateway.stop()


@pytest.mark.slow
async def test_those_that_were_in_flight_with_it_are_answered(
    start_gateway_alone: StartGateway,
) -> None:
    """They share both deaths with it: each is tried alone, and only the one that kills again is refused."""
    with Mortal() as server:
        gateway = start_gateway_alone(urls=(server.url,))
        statuses: dict[str, int] = {}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=120) as client:

            async def ask(text: str) -> None:
                reply = await client.post("/v1/chat/completions", json=asking(text))
                statuses[text] = reply.status_code

            async with anyio.create_task_group() as tg:
                for number in range(6):
                    tg.start_soon(ask, f"hold {number}")
                await in_flight(gateway, 6)
                tg.start_soon(ask, "die")
                while server.deaths < 2:
                    await anyio.sleep(0.05)  # until it has killed twice
                while len(statuses) < 7:  # those that are held are tried one at a time
                    await ask("release")
                    statuses.pop("release")
        assert statuses.pop("die") == 502
        assert set(statuses.values()) == {200}
        assert server.deaths <= 3
        gateway.stop()


class _Told(Replica):
    def die(self, incarnation: str) -> None:
        self.suspected, self.up, self.incarnation = False, True, incarnation


async def test_failures_that_are_no_deaths_are_forgotten() -> None:
    requests, replica = DeadlyRequests(600), _Told("http://127.0.0.1:9")
    replica.die("1")
    for _ in range(5):
        requests.failed("r", replica, "1")
        requests.server_checked("r")
    assert not requests.suspects
    requests.check("r")


async def test_a_request_is_refused_for_a_time_only() -> None:
    requests, replica = DeadlyRequests(0.0), _Told("http://127.0.0.1:9")
    for life in ("1", "2"):
        replica.die(life)
        requests.trial("r", replica, alone=False)
        requests.failed("r", replica, life)
    replica.die("3")
    requests.check("r")
    assert not requests.suspects
    requests = DeadlyRequests(600)
    for life in ("1", "2"):
        replica.die(life)
        requests.trial("r", replica, alone=False)
        requests.failed("r", replica, life)
    replica.die("3")
    with pytest.raises(ApiError, match="2 crashes"):
        requests.check("r")


async def test_an_answered_request_is_acquitted() -> None:
    requests, replica = DeadlyRequests(600), _Told("http://127.0.0.1:9")
    replica.die("1")
    requests.failed("r", replica, "1")
    replica.die("2")
    trial = requests.trial("r", replica, alone=False)
    assert trial is not None
    trial.answered()
    assert not requests.suspects
