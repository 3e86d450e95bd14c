"""Shadow calls that do not say the same are compared by the judge model, in both orders; the others cost nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from judge.comparing import ShadowJudge, open_answer_ruler
from pipeline.config import Config, JudgeConfig, ModelConfig, NatsConfig, OutsideConfig
from pipeline.events import AlarmChanged, AnswersCompared, ShadowAnswered
from pipeline.log.broker import Broker
from tests.judge.kit import IMPORTS_LITELLM, exchange
from tests.kits.log import acknowledged
from tests.kits.scoring_server import Scorer, ScoringServer
from tests.kits.settings import with_values
from tests.store import kit

pytestmark = IMPORTS_LITELLM

OUTSIDE = OutsideConfig(name="master", url="http://h/v1", apprentice="m", shadow_percent=100.0, may_train=True)


def answered(text: str) -> bytes:
    return msgspec.json.encode({"choices": [{"message": {"role": "assistant", "content": text}}]})


def shadow(call: int, text: str, *, same: bool = False) -> ShadowAnswered:
    return kit.shadow("r", call, response=answered(text), same=same)


def settings(nats: NatsConfig, server: ScoringServer, **more: Any) -> Config:
    judge = JudgeConfig(model="openai/scorer", api_base=server.url, passes=1)
    config = Config(project="p", nats=nats, judge=judge, models=(ModelConfig(name="m"),), outside=(OUTSIDE,))
    return with_values(config, more)


@asynccontextmanager
async def comparing(broker: Broker, config: Config) -> AsyncIterator[None]:
    judge = await open_answer_ruler(config)
    async with broker.consume("judge-shadows") as arrivals, anyio.create_task_group() as tasks:
        tasks.start_soon(ShadowJudge(broker, config, judge).run, arrivals)
        yield
        tasks.cancel_scope.cancel()


async def test_answers_that_differ_are_scored_in_both_orders_and_the_others_are_not_asked_about(
    broker: Broker, nats_config: NatsConfig
) -> None:
    async with ScoringServer(Scorer(first_bonus=0.1)).run() as server, comparing(broker, settings(nats_config, server)):
        for seq in range(3):
            said = exchange("r", "quality=0.6", seq=seq)
            await broker.publish(msgspec.structs.replace(said, policy_version="outside:master", step=-1))
        for event in (shadow(0, "quality=0.2"), shadow(1, "quality=0.6", same=True), shadow(2, "quality=0.8")):
            await broker.publish(event)
        await broker.publish(shadow(7, "of a call that is gone"))
        await acknowledged(broker, "judge-shadows")
        asked = server.calls
    compared = {r.event.call: r.event for r in await broker.read(AnswersCompared)}
    assert asked == 4
    assert set(compared) == {0, 2}
    assert compared[0].outside_score > compared[0].apprentice_score
    assert compared[2].outside_score < compared[2].apprentice_score
    first = compared[0]
    assert (first.trajectory, first.model, first.outside) == ("r", "m", "master")
    assert {verdict.order for verdict in first.verdicts} == {("outside", "apprentice"), ("apprentice", "outside")}


@pytest.mark.parametrize("changes", [{"judge.model": ""}, {"budget.judge_usd": 1.0}, {}])
async def test_without_a_judge_model_money_or_an_answer_shadow_calls_pass_by(
    broker: Broker, nats_config: NatsConfig, changes: dict[str, Any]
) -> None:
    await broker.publish(AlarmChanged(project="p", alarm="over_judge_budget", state="raised", detail="spent", since=1))
    async with ScoringServer(lambda request: 500).run() as server:
        retries: dict[str, Any] = {"judge.request.retries": 0, "judge.retry_for_s": 0.0}
        async with comparing(broker, settings(nats_config, server, **retries, **changes)):
            await broker.publish(exchange("r", "x"))
            await broker.publish(shadow(0, "y"))
            await acknowledged(broker, "judge-shadows")
        assert bool(server.calls) is (not changes)
    assert await broker.read(AnswersCompared) == []
