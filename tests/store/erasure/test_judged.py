"""After an erasure no text of a person's runs is left by a judge: in log, lake, dead letters or the judge's own log."""

import json
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import pytest

from pipeline.commands import dead_letters
from pipeline.config import Config, JudgeConfig, NatsConfig, RewardConfig, save
from pipeline.events import DeadLettered, Event, GroupDiscarded, GroupScored, encode
from pipeline.log.broker import Broker
from pipeline.running.installations import SETTINGS
from tests.conftest import NatsServer
from tests.judge.kit import IMPORTS_LITELLM
from tests.kits.events import letter
from tests.kits.scoring_server import Answer, Scorer, ScoringServer
from tests.kits.services import running
from tests.kits.settings import with_values
from tests.store.erasure.test_erase import ALICE, erase, erase_all, found_in, run
from tests.store.kit import StoreProcess, publish, until_acked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), IMPORTS_LITELLM]

SECRET = "zq" + secrets.token_hex(24)
WAYS = ("unreadable", "foreign", "refused", "parts", "half", "function", "scored")


def answer(request: dict[str, Any]) -> Answer | bytes:
    """What a judge may reply, with the person's words in it, as the group asks for."""
    prompt = str(request["messages"])
    way = next(way for way in WAYS if f"way={way}" in prompt)
    said = str(Scorer()(request))
    match way:
        case "unreadable":
            return f"They said {SECRET}. {said}"
        case "foreign":
            return said.replace('"id": "', f'"id": "{SECRET}')
        case "refused":
            return 400
        case "parts":
            content = [{"type": "text", "text": SECRET}, {"type": "audio", "audio": SECRET}]
            return json.dumps({"choices": [{"message": {"content": content}}], "usage": SECRET}).encode()
        case "half":
            return said.replace('"quality', f'"\\ud83d {SECRET} quality')
        case _:
            return said.replace('"quality', f'"{SECRET} quality')


def judged(way: str) -> list[Event]:
    """Two runs of a group, whose judge answers in this way."""
    metadata, events = msgspec.json.encode({"subject": ALICE}), list[Event]()
    for name in (f"{way}-0", f"{way}-1"):
        *begun, ended = run(name, way, secret=f"{SECRET} way={way}", metadata=metadata)
        events += [*begun, msgspec.structs.replace(ended, reward=None)]  # type: ignore[call-arg]
    return events


def judge_settings(url: str) -> JudgeConfig:
    leaks = RewardConfig(name="leaks", kind="python", entry="tests.judge.functions:leaks", timeout_s=60.0)
    settings = {"request.retries": 0, "attempts": 1, "passes": 1, "retry_for_s": 0.0, "group_size": 2}
    config = JudgeConfig(
        model="openai/scorer", api_base=url, rewards=(RewardConfig(name="quality", kind="ruler"), leaks)
    )
    return with_values(config, settings)


async def test_no_text_of_a_run_outlives_its_erasure(
    running_store: StoreProcess,
    nats_config: NatsConfig,
    nats_server: NatsServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = f"can't read {json.dumps(f'go {SECRET}')}"
    async with (
        running_store() as config,
        Broker.connect(nats_config) as broker,
        ScoringServer(answer, refusal=refusal).run() as server,
    ):
        config = msgspec.structs.replace(config, project="p", judge=judge_settings(server.url))
        save(config, tmp_path / SETTINGS)
        await _judge_all(config, broker, tmp_path)
        await until_acked(broker)
        assert found_in(nats_server.folder, SECRET)
        await erase_all(config, "--untrained")
        assert (await erase(config, "--check"))[0] == 0
        assert found_in(tmp_path, SECRET) == []
        assert found_in(nats_server.folder, SECRET) == []
        assert not [record for record in caplog.records if SECRET in str(vars(record))]


@asynccontextmanager
async def judging(*command: str, log: Path) -> AsyncIterator[None]:
    """The service as a process, whose start does not stop this one's event loop."""
    judge = running(*command, log=log)
    await anyio.to_thread.run_sync(judge.__enter__)
    try:
        yield
    finally:
        await anyio.to_thread.run_sync(judge.__exit__, None, None, None)


async def _judge_all(config: Config, broker: Broker, folder: Path) -> None:
    """Judge the groups of all ways in a process, and give it a dead letter of one of them again."""
    command = (sys.executable, "-m", "judge", "--config", str(folder / SETTINGS))
    async with judging(*command, log=folder / "judge.log"):
        for way in WAYS:
            await publish(broker, judged(way))
        with anyio.fail_after(120):
            while len(await _ended(broker)) < len(WAYS):
                await anyio.sleep(0.1)
        ended = await _ended(broker)
        assert ended["scored"] == "scored"
        assert "it has an id that is not an attempt's" in ended["foreign"]
        assert "its message repeats the text that it was sent" in ended["refused"]
        completed = judged("scored")[-1]
        of_run = {"original_subject": completed.subject(), "payload": encode(completed)}
        await broker.publish(letter(reason="ended_service", **of_run))
        (dead,) = await broker.read(DeadLettered)
        await dead_letters.retry(broker, dead)
        with anyio.fail_after(120):
            while await broker.lag("judge"):
                await anyio.sleep(0.1)


async def _ended(broker: Broker) -> dict[str, str]:
    """The groups that the judge scored or discarded, and why."""
    scored = {r.event.group: "scored" for r in await broker.read(GroupScored)}
    return scored | {r.event.group: r.event.detail for r in await broker.read(GroupDiscarded)}
