"""An apprentice beside its master: gateway, judge and log together. Each part alone has tests of its own."""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread
import pytest

from judge import service
from pipeline.config import Config, HealingConfig, JudgeConfig, ModelConfig, NatsConfig
from pipeline.events import AnswersCompared, GroupScored, Hint, SignalGiven
from pipeline.log.broker import Broker
from tests.kits.scoring_server import ScoringServer
from tests.kits.waiting import until
from tests.rollout_gateway.conftest import PROJECT, StartGateway
from tests.rollout_gateway.fake_vllm import FakeVllm
from tests.rollout_gateway.kit import ASK
from tests.rollout_gateway.outside.conftest import table
from tests.rollout_gateway.outside.provider import Provider, completion, whole
from tests.rollout_gateway.outside.test_shadow import SHADOWED, ask, opened

pytestmark = pytest.mark.anyio


async def test_a_shadow_is_compared_and_a_low_run_is_healed_by_the_master(
    start_gateway_alone: StartGateway, fake_vllm: FakeVllm, provider: Provider, broker: Broker, nats_config: NatsConfig
) -> None:
    provider.says(whole(completion("quality=1.0")))
    outside = (table(provider, may_train=True, **SHADOWED),)
    gateway = await anyio.to_thread.run_sync(partial(start_gateway_alone, urls=(fake_vllm.url,), outside=outside))
    async with ScoringServer().run() as scorer, anyio.create_task_group() as tasks:
        healing = HealingConfig(outside="master", url=gateway.url)
        judge = JudgeConfig(model="openai/scorer", api_base=scorer.url, healing=healing, group_size=1, min_size=1)
        models = (ModelConfig(name="tictactoe"),)
        config = Config(project=PROJECT, nats=nats_config, models=models, outside=outside, judge=judge)
        tasks.start_soon(service.serve, config, lambda **_: None)
        of_master, of_policy = await opened(gateway), await opened(gateway, model="tictactoe")
        assert (await ask(of_master)).status_code == 200
        assert (await ask(of_policy, **ASK)).status_code == 200
        await anyio.to_thread.run_sync(partial(gateway.complete, of_policy["id"], reward=0.0))
        (scored,) = await until(partial(broker.read, GroupScored))

        async def both_compared() -> dict[str, AnswersCompared]:
            found = {r.event.trajectory: r.event for r in await broker.read(AnswersCompared)}
            return found if set(found) == {of_master["id"], of_policy["id"]} else {}

        compared = await until(both_compared)
        tasks.cancel_scope.cancel()
    assert all(event.outside_score > event.apprentice_score for event in compared.values())
    (member,) = scored.event.members
    by = "outside:master"
    assert member.hints == (Hint(call=0, text="quality=1.0", kind="correction", by=by, version=by),)
    (signal,) = await broker.read(SignalGiven)
    assert (signal.event.trajectory, signal.event.kind) == (of_policy["id"], "correction")
