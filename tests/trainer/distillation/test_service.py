"""Groups with hints or with the answers of a teacher from outside, in the trainer service on a log."""

from functools import partial
from pathlib import Path

import pytest

from pipeline.config import NatsConfig
from pipeline.events import Hint
from pipeline.log.broker import Broker
from tests.kits.settings import with_values
from tests.trainer import kit
from tests.trainer.distillation import kit as hinted
from tests.trainer.distillation.kit import publish
from tests.trainer.kit import all_acked, discards, reach, running, steps_reach


@pytest.fixture
def chat_base(tiny_base: str, tmp_path: Path) -> str:
    return hinted.chat_base(tiny_base, tmp_path / "base")


@pytest.fixture
def training(nats_config: NatsConfig, chat_base: str, tmp_path: Path) -> kit.Training:
    return partial(kit.training, nats_config, chat_base, tmp_path)


async def test_single_runs_with_hints_and_no_reward_become_a_checkpoint(training: kit.Training) -> None:
    """What is taught: the three tokens of call 0. A hint of a call that the run has not is counted. Old runs, and runs
    without hints, are discarded as ever."""
    settings = {
        "groups_per_step": 1,
        "max_staleness": 0,
        "distill.weight": 1.0,
        "distill.divergence": "reverse_kl",
        "distill.hint_template": " {hint}",
    }
    async with training(**settings) as broker:
        await publish(broker, "none")
        await publish(broker, "hinted", (Hint(call=-1, text="9"), Hint(call=7, text="9")))
        (event,) = await steps_reach(broker, 1)
        assert event.groups == ("hinted",)
        assert event.metrics["tokens_taught"] == 3
        assert event.metrics["hints_unused"] == 1
        assert event.metrics["grad_norm"] > 0
        await publish(broker, "old", (Hint(call=0, text="9"),))
        await all_acked(broker)
        found = await reach(2, discards, broker)
        assert {(d.group, d.reason) for d in found} == {("none", "too_small"), ("old", "stale")}


@pytest.mark.parametrize("rewards", [(0.0,), (0.5, 0.5)])
async def test_equal_rewards_and_hints_that_can_t_be_used_take_no_place_in_a_step(
    training: kit.Training, rewards: tuple[float, ...]
) -> None:
    async with training(groups_per_step=1, **{"distill.weight": 1.0}) as broker:
        await publish(broker, "unusable", (Hint(call=7, text="9"),), rewards=rewards)
        await publish(broker, "hinted", (Hint(call=0, text="9"),))
        (event,) = await steps_reach(broker, 1)
        assert event.groups == ("hinted",)
        await all_acked(broker)
        (discard,) = await discards(broker)
        assert (discard.group, discard.reason) == ("unusable", "no_variance")
        count = len(rewards)
        assert f"of {count}, no prompt could be made of {count}" in discard.detail


async def test_the_groups_best_run_teaches_its_worse_runs(training: kit.Training) -> None:
    """All calls of the worse run. Where no run is better, or the best is not good enough, nothing is taught."""
    async with training(groups_per_step=1, **{"distill.weight": 1.0, "distill.best_run_reward": 0.5}) as broker:
        await publish(broker, "equal", rewards=(0.5, 0.5))
        await publish(broker, "good", rewards=(0.0, 0.7, 0.7))
        await publish(broker, "bad", rewards=(0.0, 0.4))
        good, bad = await steps_reach(broker, 2)
        assert (good.groups, good.metrics["tokens_taught"], good.metrics["hints"]) == (("good",), 6, 2)
        assert (bad.groups, bad.metrics["hints"]) == (("bad",), 0)
        assert "tokens_taught" not in bad.metrics
        await all_acked(broker)
        assert [d.reason for d in await discards(broker)] == ["no_variance"]


@pytest.mark.parametrize("divergence", ["sampled", "reverse_kl"])
async def test_runs_that_a_teacher_from_outside_answered_for_become_a_checkpoint(
    nats_config: NatsConfig, chat_base: str, tmp_path: Path, divergence: str
) -> None:
    """Without a reward, and without the teacher. Runs without an answer, answers about other tokens and old runs are
    discarded as ever; hints are not asked for."""
    config = kit.settings(
        chat_base,
        tmp_path,
        nats_config,
        **{
            "groups_per_step": 1,
            "max_staleness": 0,
            "distill.weight": 1.0,
            "distill.teacher": "outside",
            "distill.divergence": divergence,
        },
    )
    config = with_values(config, {"teacher.url": "http://127.0.0.1:1/v1", "teacher.model": "big"})
    async with Broker.connect(nats_config) as broker, running(config):
        await publish(broker, "hinted", (Hint(call=0, text="9"),))
        await publish(broker, "other", teacher="big", answered=5)
        await publish(broker, "taught", teacher="big")
        (event,) = await steps_reach(broker, 1)
        assert event.groups == ("taught",)
        assert event.metrics["tokens_taught"] == event.metrics["tokens"] == 6
        assert event.metrics["grad_norm"] > 0
        await publish(broker, "old", teacher="big")
        await all_acked(broker)
        reasons = {d.group: d.reason for d in await reach(3, discards, broker)}
        assert reasons == {"hinted": "too_small", "other": "no_variance", "old": "stale"}
