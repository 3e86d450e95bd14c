"""A prompt is promoted and rolled back with a version. The model sees it, and the log has what the model saw."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anyio.to_thread
import httpx
import pytest

from pipeline.events import ExchangeRecorded, PolicyPromoted
from pipeline.log.broker import Broker
from rollout_gateway.serving import command
from tests.rollout_gateway.conftest import PROJECT, GatewayProcess, StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.kit import exchanges, key_config
from tests.rollout_gateway.outside.conftest import table
from tests.rollout_gateway.outside.provider import Provider, completion, whole

pytestmark = pytest.mark.anyio

OLD, NEW = "Play.", "Play well."
BASE, MASTER = "tictactoe@0", "outside:master"


class Seeing(FakeVllm):
    """Keeps the messages of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[str]] = []

    async def before(self, path: str, body: Any, writer: Any) -> None:
        if path.startswith("/v1/chat"):
            self.seen.append([message["content"] for message in body["messages"]])


class Shop:
    def __init__(self, gateway: GatewayProcess, server: Seeing, client: httpx.AsyncClient) -> None:
        self.gateway, self.server, self.client = gateway, server, client

    async def post(self, path: str, status: int = 200, key: str = "a", **body: Any) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        answer = await self.client.post(f"{self.gateway.url}/{path}", json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def call(self, model: str = "tictactoe", run: str = "", says: Any = None, **more: Any) -> Any:
        messages = says or [{"role": "system", "content": OLD}, {"role": "user", "content": "go"}]
        at = f"t/{run}/v1" if run else "v1"
        return await self.post(f"{at}/chat/completions", model=model, messages=messages, **more)

    async def decide(self, model: str, action: str, status: int = 200, key: str = "op", **body: Any) -> Any:
        return await self.post(f"v1/policies/{model}/{action}", status, key, **body)


@pytest.fixture
async def shop(start_gateway_alone: StartGateway, provider: Provider) -> Any:
    provider.says(whole(completion("hi")))
    server = Seeing()
    await server.start()
    outside = (table(provider, apprentice="tictactoe"),)
    keys = (key_config("a"), key_config("op", role="operator"))
    start = partial(start_gateway_alone, urls=(server.url,), outside=outside, keys=keys, **{"detection.enabled": True})
    gateway = await anyio.to_thread.run_sync(start)
    async with httpx.AsyncClient(timeout=60) as client:
        yield Shop(gateway, server, client)
    await anyio.to_thread.run_sync(gateway.stop)
    await server.stop()


def system_of(exchange: ExchangeRecorded) -> str:
    return str(json.loads(exchange.request)["messages"][0]["content"])


async def test_a_prompt_tells_nothing_of_another_keys_run(shop: Shop) -> None:
    await shop.decide("tictactoe", "promote", version=BASE, prompt=NEW, replaces=OLD)
    await shop.post("v1/trajectories", 201, key="op", model="tictactoe", id="pinned", pinned=BASE)
    asked: Any = {"model": "tictactoe", "instructions": OLD, "input": "go"}
    assert (await shop.post("v1/responses", **asked))["instructions"] == OLD  # an answer shows what its caller sent
    refused = [await shop.post(f"t/{name}/v1/responses", 404, **asked) for name in ("pinned", "no-such-run")]
    assert refused[0]["error"]["message"].replace("pinned", "no-such-run") == refused[1]["error"]["message"]


async def test_a_prompt_is_promoted_seen_recorded_and_rolled_back(shop: Shop, broker: Broker) -> None:
    prompt: Any = {"version": BASE, "prompt": NEW, "replaces": OLD}
    await shop.decide("tictactoe", "promote", 403, key="a", **prompt)
    await shop.decide("tictactoe", "promote", 400, version=BASE, prompt=NEW)
    await shop.decide("tictactoe", "split", 400, other=BASE, **prompt)
    await shop.decide("tictactoe", "promote", **prompt)
    for name, more in (("r", {}), ("pinned", {"pinned": BASE})):
        await shop.post("v1/trajectories", 201, model="tictactoe", id=name, **more)
        await shop.call(run=name)
    await shop.call(run="r", says=[{"role": "system", "content": "Play badly."}, {"role": "user", "content": "go"}])
    await shop.decide("tictactoe", "rollback")
    await shop.call(run="r", seed=1)
    decision = (await broker.read(PolicyPromoted))[0].event
    own, kept, after = await exchanges(broker, "r")
    (pinned,) = await exchanges(broker, "pinned")
    assert [(system_of(e), e.prompt) for e in (own, kept, after, pinned)] == [
        (NEW, decision.prompt_id),
        ("Play badly.", ""),
        (OLD, ""),
        (OLD, ""),
    ]
    assert [seen[0] for seen in shop.server.seen] == [NEW, OLD, "Play badly.", OLD]
    await shop.decide("tictactoe", "rollback", 409)


async def test_an_agent_that_goes_on_with_its_own_prompt_goes_on_with_its_run(shop: Shop, broker: Broker) -> None:
    """Runs are detected by what the agent sends, which is not what the log has."""
    await shop.decide("tictactoe", "promote", version=BASE, prompt=NEW, replaces=OLD)
    says: list[Any] = [{"role": "system", "content": OLD}, {"role": "user", "content": "go"}]
    for turn in range(3):
        answer = await shop.call(says=says)
        says += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    calls = [r.event for r in await broker.read(ExchangeRecorded, project=PROJECT)]
    assert len({call.trajectory for call in calls}) == 1
    assert [system_of(call) for call in calls] == [NEW] * 3


async def test_an_outside_model_gets_its_prompt_and_its_apprentice_none(
    shop: Shop, provider: Provider, broker: Broker
) -> None:
    await shop.decide("master", "promote", version=MASTER, prompt=NEW, replaces=OLD)
    for name in ("r", "s"):
        await shop.post("v1/trajectories", 201, model="master", id=name)
    await shop.call("master", "r")
    await shop.decide("master", "promote", version=BASE)
    await shop.post("v1/trajectories", 201, model="master", id="after")
    for name in ("s", "after"):
        await shop.call("master", name)
    (sent,) = [json.loads(got.body) for got in provider.got][:1]
    assert [sent["model"], sent["messages"][0]["content"]] == ["big", NEW]
    systems = {name: system_of((await exchanges(broker, name))[0]) for name in ("r", "s", "after")}
    assert systems == {"r": NEW, "s": OLD, "after": OLD}


async def test_the_command_promotes_a_prompt_from_files(
    shop: Shop, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOURNEYWORK_API_KEY", "op")
    for name, text in (("old", OLD), ("new", NEW)):
        (tmp_path / name).write_text(text)
    line = ["promote", BASE, "--prompt", str(tmp_path / "new"), "--replaces", str(tmp_path / "old")]
    await anyio.to_thread.run_sync(command.main, [*line, "--url", shop.gateway.url])
    assert f"{BASE} with the prompt " in capsys.readouterr().out
    await shop.call()
    assert shop.server.seen[-1][0] == NEW
