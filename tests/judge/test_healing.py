"""A correction of an outside model teaches only if the judge model scores it higher than what the policy said."""

import json
import signal as signals
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from judge.comparing import open_answer_ruler
from judge.healing import Healer, open_healer
from pipeline import streams
from pipeline.config import (
    Config,
    ConfigError,
    HealingConfig,
    JudgeConfig,
    ModelConfig,
    NatsConfig,
    OutsideConfig,
    save,
)
from pipeline.config.checks import check
from pipeline.events import AnswersCompared, DeadLettered, GroupScored, Hint, Member, SignalGiven
from pipeline.log.broker import Broker
from tests.judge.kit import IMPORTS_LITELLM, completed, exchange, groups
from tests.kits.crash.processes import fork_server
from tests.kits.quick_service import quick_consumers
from tests.kits.scoring_server import ScoringServer
from tests.kits.settings import with_values

pytestmark = IMPORTS_LITELLM

OUTSIDE = "outside:master"
CORRECTION = Hint(call=0, text="quality=0.9", kind="correction", by=OUTSIDE, version=OUTSIDE)
MASTER = OutsideConfig(name="master", url="http://h/v1", may_train=True, input_usd=1e6, output_usd=1e6)


def settings(nats: NatsConfig, judge: ScoringServer, gateway: ScoringServer, **more: Any) -> Config:
    healing = HealingConfig(outside="master", url=gateway.url)
    rules = JudgeConfig(
        model="openai/scorer", api_base=judge.url, healing=healing, group_size=1, min_size=1, retry_for_s=0.0
    )
    config = Config(project="p", nats=nats, judge=rules, models=(ModelConfig(name="m"),), outside=(MASTER,))
    return with_values(config, {"judge.healing.max_usd": 1e9, **more})


def master(*replies: str | int | bytes) -> ScoringServer:
    waiting = list(replies)
    return ScoringServer(lambda request: waiting.pop(0) if len(waiting) > 1 else waiting[0], keep=True)


@asynccontextmanager
async def healing(
    broker: Broker, nats: NatsConfig, gateway: ScoringServer, judge_model: ScoringServer | None = None, **more: Any
) -> AsyncIterator[tuple[Healer, ScoringServer]]:
    async with (judge_model or ScoringServer()).run() as judge, gateway.run():
        config = settings(nats, judge, gateway, **more)
        check(config)
        async with open_healer(config, broker, await open_answer_ruler(config)) as healer:
            assert healer is not None
            yield healer, judge


def scored(reward: float, calls: int = 1, **member: Any) -> GroupScored:
    run = Member(trajectory="r", reward=reward, exchanges=calls, **member)
    return GroupScored(project="p", group="g", model="m", judge="j", members=(run,))


async def play(broker: Broker, *replies: str) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "look"}}]
    messages: list[Any] = [{"role": "user", "content": "Win."}]
    for seq, reply in enumerate(replies):
        request = {"messages": list(messages), "tools": tools, "stream": True, "seed": 7, "model": "m"}
        await broker.publish(
            msgspec.structs.replace(exchange("r", reply, seq=seq), request=msgspec.json.encode(request))
        )
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Go on."}]


async def signals_on_log(broker: Broker) -> list[SignalGiven]:
    return [r.event for r in await broker.read(SignalGiven)]


LOOK = '{"name":"look","arguments":"quality=0.9"}'
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": json.loads(LOOK)}]}
BY_TOOL = json.dumps({"choices": [{"index": 0, "message": CALLS}], "usage": None}).encode()


@pytest.mark.parametrize(("answer", "text"), [("quality=0.9", "quality=0.9"), (BY_TOOL, LOOK)], ids=["text", "tools"])
async def test_a_better_answer_is_a_correction_on_the_log_and_a_hint_of_the_member(
    broker: Broker, nats_config: NatsConfig, answer: str | bytes, text: str
) -> None:
    gateway = master(answer)
    async with healing(broker, nats_config, gateway) as (healer, _):
        await play(broker, "quality=0.2")
        healed = await healer(scored(0.1))
        again = await healer(scored(0.1))  # as after a crash before the group was published
    assert healed.members[0].hints == again.members[0].hints == (msgspec.structs.replace(CORRECTION, text=text),)
    (request,) = gateway.requests
    assert set(request) == {"messages", "tools", "model"}
    assert (request["model"], request["messages"]) == ("master", [{"role": "user", "content": "Win."}])
    (signal,) = await signals_on_log(broker)
    assert (signal.kind, signal.text, signal.call, signal.source) == ("correction", text, 0, "healing")
    assert (signal.trajectory, signal.group, signal.model, signal.by) == ("r", "g", "m", "outside:master")
    (compared,) = await broker.read(AnswersCompared)
    assert compared.event.outside_score > compared.event.apprentice_score


async def test_a_run_is_healed_although_a_shadow_of_its_masters_call_was_compared(
    broker: Broker, nats_config: NatsConfig
) -> None:
    async with healing(broker, nats_config, master("quality=0.9")) as (healer, _):
        await play(broker, "quality=0.2")
        by_master = exchange("r", "quality=0.8", seq=1)
        await broker.publish(msgspec.structs.replace(by_master, policy_version="outside:master", step=-1))
        names: Any = {"project": "p", "trajectory": "r", "call": 1, "model": "m", "outside": "master"}
        await broker.publish(AnswersCompared(**names, outside_score=1.0, apprentice_score=0.0))
        healed = await healer(scored(0.1, calls=2))
    assert healed.members[0].hints == (CORRECTION,)


MESSAGE = {"role": "assistant", "content": '{"reply": 1}'}
BY_APPRENTICE = msgspec.json.encode({"model": "m@3", "choices": [{"index": 0, "message": MESSAGE}]})
"""It has taken over the model's name, and nothing of its own is a correction."""


NOT_HEALED: dict[str, tuple[GroupScored, str | int | bytes, dict[str, Any]]] = {
    "good": (scored(0.5), "quality=0.9", {}),
    "masked": (scored(0.1, outcome="masked"), "quality=0.9", {}),
    "held out": (msgspec.structs.replace(scored(0.1), split="val"), "quality=0.9", {}),
    "of another model": (msgspec.structs.replace(scored(0.1), model="other"), "quality=0.9", {}),
    "no money": (scored(0.1), "quality=0.9", {"judge.healing.max_usd": 0.0}),
    "no time": (scored(0.1), "quality=0.9", {"judge.healing.wait_s": 1e-9}),
    "gone": (scored(0.1, calls=3), "quality=0.9", {}),
    "refuses": (scored(0.1, calls=2), 429, {}),
    "names no call": (scored(0.1, calls=2), "the second one", {}),
    "another answers": (scored(0.1, calls=2), BY_APPRENTICE, {}),
}


@pytest.mark.parametrize("why", NOT_HEALED)
async def test_runs_that_are_not_healed(broker: Broker, nats_config: NatsConfig, why: str) -> None:
    group, reply, more = NOT_HEALED[why]
    async with healing(broker, nats_config, master(reply), **more) as (healer, _):
        await play(broker, "quality=0.2", *["quality=0.1"] * (group.members[0].exchanges == 2))
        assert await healer(group) == group
    assert await signals_on_log(broker) == []


@pytest.mark.parametrize("said", ["quality=0.1", "quality=0.2 too", ""])
async def test_an_answer_that_is_no_better_teaches_nothing(broker: Broker, nats_config: NatsConfig, said: str) -> None:
    async with healing(broker, nats_config, master(said)) as (healer, _):
        await play(broker, "quality=0.2")
        group = scored(0.1)
        assert await healer(group) == group
        assert await healer(group) == group
    assert await signals_on_log(broker) == []
    assert len(await broker.read(AnswersCompared)) == 1


async def test_the_call_at_fault_is_the_lowest_graded_or_the_one_that_the_outside_model_names(
    broker: Broker, nats_config: NatsConfig
) -> None:
    gateway = master('The first: {"reply": 1}', "quality=0.9")
    async with healing(broker, nats_config, gateway) as (healer, _):
        await play(broker, "quality=0.3", "quality=0.2", "quality=0.4")
        healed = await healer(scored(0.1, calls=3))
        assert [hint.call for hint in healed.members[0].hints] == [1]
        asked = gateway.requests[0]["messages"][0]["content"]
        assert "Reply 1: quality=0.2" in asked
        assert len(gateway.requests[1]["messages"]) == 3
    await broker.publish(exchange("r2", "quality=0.3"))
    await broker.publish(exchange("r2", "quality=0.2", seq=1))
    async with healing(broker, nats_config, master("quality=0.9")) as (healer, _):
        run = Member(trajectory="r2", reward=0.0, exchanges=2, call_rewards={"0": -1.0, "1": 0.5, "9": -5.0})
        healed = await healer(msgspec.structs.replace(scored(0.1), members=(run,)))
    assert [hint.call for hint in healed.members[0].hints] == [0]


@pytest.mark.parametrize(
    ("replies", "judges", "calls"),
    [
        (("quality=0.1",), 200, 1),
        (("quality=0.2",), 200, 1),
        (("",), 200, 1),
        (("quality=0.9",), 400, 1),
        (("the second one",), 200, 2),
    ],
    ids=["worse", "the same", "nothing", "not comparable", "names no call"],
)
async def test_money_of_a_day_is_spent_once_by_all_judges(
    broker: Broker, nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch, replies: Any, judges: int, calls: int
) -> None:
    gateway, second_gateway = master(*replies), master(429, "quality=0.1")
    limit: dict[str, Any] = {"judge.healing.max_usd": 1.0}
    failing = master(judges) if judges != 200 else None
    await broker.publish(exchange("s", "quality=0.2"))
    other = Member(trajectory="s", reward=0.1, exchanges=1)
    others = msgspec.structs.replace(scored(0.1), members=(other,))
    async with (
        healing(broker, nats_config, gateway, failing, **limit) as (healer, _),
        healing(broker, nats_config, second_gateway, **limit) as (second, _),
    ):
        await second(others)  # its day begins, and nothing is paid
        await play(broker, *["quality=0.2"] * calls)
        await healer(scored(0.1, calls=calls))
        await healer(others)
        assert len(gateway.requests) == 1
        await second(others)
        assert len(second_gateway.requests) == 1
        tomorrow = time.time() + 86_400
        monkeypatch.setattr(time, "time", lambda: tomorrow)
        await second(others)
        assert len(second_gateway.requests) == 2


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"outside": (MASTER.replace(name="another"),)}, "no model 'master'"),
        ({"outside": (MASTER.replace(may_train=False),)}, "nothing may learn"),
        ({"outside": (MASTER.replace(dialect="messages"),)}, "dialect chat"),
        ({"judge": JudgeConfig(healing=HealingConfig(outside="master"))}, "set judge.model"),
    ],
)
def test_settings_that_cannot_heal(changed: dict[str, Any], error: str) -> None:
    judge = JudgeConfig(model="openai/scorer", healing=HealingConfig(outside="master"))
    config = Config(models=(ModelConfig(name="m"),), outside=(MASTER,), judge=judge)
    check(config)
    with pytest.raises(ConfigError, match=error):
        check(msgspec.structs.replace(config, **changed))


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("point", ["judge.healing_compared", "broker.after_publish"])
async def test_a_run_is_healed_at_most_once_and_its_group_is_scored_whenever_a_judge_dies(
    nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setattr(streams, "CONSUMERS", quick_consumers(0.5, endless=True))
    async with (
        Broker.connect(msgspec.structs.replace(nats_config, provision=True)) as broker,
        ScoringServer().run() as judge,
        master("quality=0.9").run() as gateway,
    ):
        config = settings(nats_config, judge, gateway, run_dir=str(tmp_path))
        save(config, tmp_path / "judge.toml")
        async with fork_server(tmp_path / "judge.toml", "judge", "litellm", ack_wait_s=0.5) as server:
            dying = server.start("judge", f"{point}:1")
            await play(broker, "quality=0.2")
            await broker.publish(completed("r", reward=0.1, exchanges=1))
            with anyio.fail_after(120):
                await dying.ended.wait()
            assert dying.status == -signals.SIGKILL
            heir = server.start("judge")
            (group,) = await groups(broker, 1)
            await heir.end(signals.SIGKILL)
        assert len(await broker.read(AnswersCompared)) == 1
        given = await signals_on_log(broker)
        assert group.members[0].hints == ((CORRECTION,) if given else ())
        assert len(given) <= 1
        assert await broker.read(DeadLettered) == []
