"""A request that kills its inference server, which is a real process here: it is refused, and the others go on."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import anyio
import anyio.to_thread
import httpx
import openai
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.blame import Blame
from rollout_gateway.serving.replicas import Replica
from tests.conftest import free_port
from tests.rollout_gateway.capture.test_chat import exchanges
from tests.rollout_gateway.conftest import GatewayProcess, StartGatewayAlone

pytestmark = pytest.mark.anyio


class Mortal:
    """A `deadly_server` that is started again whenever it ends."""

    def __init__(self) -> None:
        self.port, self.deaths, self._stopping = free_port(), 0, False
        self._counted = threading.Condition()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _keep(self) -> None:
        command = [sys.executable, "-m", "tests.rollout_gateway.deadly_server", str(self.port)]
        while not self._stopping:
            self._process = subprocess.Popen(command)
            if self._stopping:
                self._process.kill()
            self._process.wait()
            with self._counted:
                self.deaths += not self._stopping
                self._counted.notify_all()

    def died(self, deaths: int) -> bool:
        """Wait until it died so many times: the gateway can tell of a death before it is counted here. Return whether it died
        that often and not more often."""
        with self._counted:
            self._counted.wait_for(lambda: self.deaths >= deaths, 60)
            return self.deaths == deaths

    def __enter__(self) -> Mortal:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping = True
        if self._process is not None:
            self._process.kill()
        self._thread.join(10)


def asking(text: str, **more: Any) -> Any:
    return {"model": "tictactoe", "messages": [{"role": "user", "content": text}], **more}


@pytest.mark.parametrize("how", ["die", "die slowly"])
async def test_a_request_that_kills_twice_is_refused_and_recorded(
    start_gateway_alone: StartGatewayAlone, nats_config: NatsConfig, how: str
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
        assert "in flight at 2 deaths" in refused.value.message
        assert server.died(2)
        assert good.chat.completions.create(**asking("hello again")).choices
        # The same again is not sent; another body is.
        with pytest.raises(openai.APIStatusError, match="in flight at 2 deaths"):
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


async def test_those_that_were_in_flight_with_it_are_answered(
    start_gateway_alone: StartGatewayAlone,
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


async def in_flight(gateway: GatewayProcess, calls: int) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        with anyio.fail_after(30):
            while True:
                (replica,) = (await client.get("/health")).json()["replicas"]
                if replica["in_flight"] >= calls:
                    return
                await anyio.sleep(0.02)  # until the server has them


class _Told(Replica):
    def die(self, incarnation: str) -> None:
        self.doubted, self.up, self.incarnation = False, True, incarnation


async def test_failures_that_are_no_deaths_are_forgotten() -> None:
    blame, replica = Blame(600), _Told("http://127.0.0.1:9")
    replica.die("1")
    for _ in range(5):
        blame.broke("r", replica, "1")
        blame.looked("r")
    assert not blame.cases
    blame.check("r")


async def test_a_request_is_refused_for_a_time_only() -> None:
    blame, replica = Blame(0.0), _Told("http://127.0.0.1:9")
    for life in ("1", "2"):
        replica.die(life)
        blame.trial("r", replica, alone=False)
        blame.broke("r", replica, life)
    replica.die("3")
    blame.check("r")
    assert not blame.cases
    blame = Blame(600)
    for life in ("1", "2"):
        replica.die(life)
        blame.trial("r", replica, alone=False)
        blame.broke("r", replica, life)
    replica.die("3")
    with pytest.raises(ApiError, match="2 deaths"):
        blame.check("r")


async def test_an_answered_request_is_acquitted() -> None:
    blame, replica = Blame(600), _Told("http://127.0.0.1:9")
    replica.die("1")
    blame.broke("r", replica, "1")
    replica.die("2")
    trial = blame.trial("r", replica, alone=False)
    assert trial is not None
    trial.answered()
    assert not blame.cases
