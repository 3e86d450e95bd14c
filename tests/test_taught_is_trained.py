"""A teacher from outside, from real vLLM over the judge and the log to the trainer: what it says of a token is what the
trainer computes of it."""

from pathlib import Path

import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from tests.conftest import VllmServer
from tests.judge.kit import groups, judging
from tests.kits.events import completed
from tests.kits.settings import with_values
from tests.trainer import kit
from tests.trainer.engine.test_vllm import play
from tests.trainer.kit import running, steps_reach

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("divergence", ["sampled", "reverse_kl"])
async def test_a_policy_learns_nothing_from_itself(
    nats_config: NatsConfig, vllm_server: VllmServer, tmp_path: Path, divergence: str
) -> None:
    """The teacher is the base model, and so is the policy of step 0: no divergence, and no gradient."""
    name = f"{vllm_server.model}@0"
    taught = {"distill.weight": 1.0, "distill.teacher": "outside", "distill.divergence": divergence}
    steps = {"groups_per_step": 1, "logprob_bound": 1e-3, **taught}
    config = kit.settings(str(vllm_server.base), tmp_path, nats_config, **steps)
    teacher = {"teacher.url": f"{vllm_server.url}/v1", "teacher.model": name, "teacher.retries": 0}
    config = with_values(config, {"judge.min_size": 1, **teacher})
    async with Broker.connect(nats_config) as broker:
        async with judging(broker, config):
            exchanges = play(vllm_server, name, 0, "run", temperature=1.0)
            for exchange in exchanges:
                await broker.publish(exchange)
            of_run = {"model": kit.MODEL, "group": "run", "group_size": 1, "exchanges": len(exchanges)}
            await broker.publish(completed("run", **of_run))
            (group,) = await groups(broker, 1)
            assert group.members[0].teacher == name
        async with running(config):
            (event,) = await steps_reach(broker, 1)
    assert event.metrics["tokens_taught"] == event.metrics["tokens"] > 0
    assert abs(event.metrics["teacher_gap"]) < 1e-4
    assert event.metrics["grad_norm"] < 1e-3
