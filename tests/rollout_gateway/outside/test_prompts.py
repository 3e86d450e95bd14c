"""A prompt is promoted and rolled back with a version. The model sees it, and the log has what the model saw."""

import json
from typing import Any

import anyio.to_thread
import pytest

from pipeline.events import ExchangeRecorded, PolicyPromoted
from pipeline.log.broker import Broker
from rollout_gateway.serving import command
from tests.rollout_gateway.conftest import PROJECT
from tests.rollout_gateway.kit import exchanges, key_config
from tests.rollout_gateway.outside.conftest import MASTER, OpenShop, Shop
from tests.rollout_gateway.outside.provider import Provider

OLD, NEW = "Play.", "Play well."
BASE = "tictactoe@0"


@pytest.fixture
async def shop(open_shop: OpenShop) -> Shop:
    keys = (key_config("a"), key_config("op", role="operator"))
    return await open_shop(promote=False, key="op", keys=keys, **{"detection.enabled": True})


async def call(shop: Shop, model: str = "tictactoe", run: str = "", says: Any = None, **more: Any) -> Any:
    messages = says or [{"role": "system", "content": OLD}, {"role": "user", "content": "go"}]
    at = f"/t/{run}" if run else ""
    return await shop.post(f"{at}/v1/chat/completions", model=model, messages=messages, **more)


def system_of(exchange: ExchangeRecorded) -> str:
    return str(json.loads(exchange.request)["messages"][0]["content"])


async def test_a_prompt_tells_nothing_of_another_keys_run(shop: Shop) -> None:
    await shop.decide("promote", model="tictactoe", version=BASE, prompt=NEW, replaces=OLD)
    await shop.open("pinned", model="tictactoe", pinned=BASE)
    asked: Any = {"key": "a", "model": "tictactoe", "instructions": OLD, "input": "go"}
    for metadata in ({}, {"journeywork_trajectory": "pinned"}):  # that of a chat completion would name the run
        said = await shop.post("/v1/responses", **asked, metadata=metadata)
        assert said["instructions"] == OLD  # an answer shows what its caller sent
    refused = [await shop.post(f"/t/{name}/v1/responses", 404, **asked) for name in ("pinned", "no-such-run")]
    assert refused[0]["error"]["message"].replace("pinned", "no-such-run") == refused[1]["error"]["message"]


async def test_a_prompt_is_promoted_seen_recorded_and_rolled_back(shop: Shop, broker: Broker) -> None:
    about: Any = {"model": "tictactoe", "version": BASE}
    prompt = {**about, "prompt": NEW, "replaces": OLD}
    await shop.decide("promote", 403, key="a", **prompt)
    await shop.decide("promote", 400, **about, prompt=NEW)
    await shop.decide("split", 400, other=BASE, **prompt)
    await shop.decide("promote", **prompt)
    for name, more in (("r", {}), ("pinned", {"pinned": BASE})):
        await shop.open(name, model="tictactoe", **more)
        await call(shop, run=name)
    await call(shop, run="r", says=[{"role": "system", "content": "Play badly."}, {"role": "user", "content": "go"}])
    await shop.decide("rollback", model="tictactoe")
    await call(shop, run="r", seed=1)
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
    await shop.decide("rollback", 409, model="tictactoe")


async def test_an_agent_that_goes_on_with_its_own_prompt_goes_on_with_its_run(shop: Shop, broker: Broker) -> None:
    """Runs are detected by what the agent sends, which is not what the log has."""
    await shop.decide("promote", model="tictactoe", version=BASE, prompt=NEW, replaces=OLD)
    says: list[Any] = [{"role": "system", "content": OLD}, {"role": "user", "content": "go"}]
    for turn in range(3):
        answer = await call(shop, says=says)
        says += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn}"}]
    calls = [r.event for r in await broker.read(ExchangeRecorded, project=PROJECT)]
    assert len({call.trajectory for call in calls}) == 1
    assert [system_of(call) for call in calls] == [NEW] * 3


async def test_an_outside_model_gets_its_prompt_and_its_apprentice_none(
    shop: Shop, provider: Provider, broker: Broker
) -> None:
    await shop.decide("promote", version=MASTER, prompt=NEW, replaces=OLD)
    for name in ("r", "s"):
        await shop.open(name)
    await call(shop, "master", "r")
    await shop.decide("promote", version=BASE)
    await shop.open("after")
    for name in ("s", "after"):
        await call(shop, "master", name)
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
    await call(shop)
    assert shop.server.seen[-1][0] == NEW
