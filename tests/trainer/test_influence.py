"""The influence of a step's runs, where the step's folder is gone."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config import Config, FeedbackConfig, NatsConfig
from pipeline.events import Grader
from pipeline.log.broker import Broker
from tests.trainer import kit
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.influence import Influence, influences
from trainer.service import train

pytestmark = pytest.mark.anyio


async def publish(
    broker: Broker,
    name: str,
    step: int,
    split: str = "train",
    *,
    rewards: Sequence[float] = (0.0, 1.0),
    first: int | None = None,
    old: int = 1,
    graders: tuple[Grader, ...] = (),
) -> None:
    """A group of runs of one call. The calls of the first `old` runs are of the version `first`. Those with
    `graders` graded each run."""
    scored = kit.group(name, rewards, step=step, exchanges=1, split=split, task="capital")
    members = tuple(
        msgspec.structs.replace(member, split=split, graders=graders) for member in scored.members
    )
    for at, member in enumerate(members):
        played = first if first is not None and at < old else step
        answer = 8 if member.reward else 7
        await broker.publish(
            kit.exchange(member.trajectory, 0, [5, 6], [answer, 9], logprobs=[-2.0, -4.0], step=played)
        )
    await broker.publish(msgspec.structs.replace(scored, members=members))


def with_own_settings(config: Config, weight: float) -> Config:
    """With settings that the model has for itself: another shape of the adapter, a KL term and an entropy bonus."""
    loss = {"beta": weight, "entropy_coef": weight}
    own = {"lora": {"rank": 2}, "loss": loss, "optimizer": {"learning_rate": 0.05}}
    return msgspec.structs.replace(config, models=(msgspec.structs.replace(config.models[0], trainer=own),))


async def test_influences_are_of_the_models_own_settings_and_without_kl_terms_and_entropy_bonus(
    broker: Broker, nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    config = kit.settings(tiny_base, tmp_path, nats_config, groups_per_step=1)
    with_terms = with_own_settings(config, 0.5)
    await publish(broker, "v", 0, split="val")
    for step in (1, 2):
        await publish(broker, f"g{step}", step - 1)
    await train(with_terms, lambda **_: None, until_empty=True)
    shutil.rmtree(Checkpoints.of(config, kit.MODEL).path(2))
    told: list[str] = []
    ranked: list[list[Influence]] = [
        await influences(settings, f"{kit.MODEL}@2", ["capital"], told.append)
        for settings in (with_terms, with_own_settings(config, 0.0))
    ]
    assert "the settings of step 2 are gone with its folder; the present ones of the model are used" in told
    first, second = ranked
    assert [run.trajectory for run in first] == [run.trajectory for run in second]
    assert [run.influence for run in first] == pytest.approx([run.influence for run in second], rel=1e-4)
    assert max(abs(run.influence) for run in first) > 1e-3


async def test_a_run_that_was_too_old_for_the_step_has_no_influence(
    broker: Broker, nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    config = kit.settings(tiny_base, tmp_path, nats_config, groups_per_step=1, max_staleness=1)
    await publish(broker, "v", 0, split="val")
    for step in (1, 2):
        await publish(broker, f"g{step}", step - 1)
    await publish(broker, "g3", 2, rewards=(0.0, 1.0, 0.0), first=0)
    await train(config, lambda **_: None, until_empty=True)
    ranked = await influences(config, f"{kit.MODEL}@3", ["capital"])
    assert {run.trajectory for run in ranked} == {"g3-1", "g3-2"}


async def test_runs_are_compared_with_the_earlier_runs_of_their_task_as_in_the_step(
    broker: Broker, nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    loss = {"loss.baseline": "task", "loss.advantage_scaling": "none"}
    config = kit.settings(tiny_base, tmp_path, nats_config, groups_per_step=1, **loss)
    await publish(broker, "v", 0, split="val")
    for step, reward in enumerate((0.0, 1.0), 1):
        await publish(broker, f"g{step}", step - 1, rewards=(reward,))
    await train(config, lambda **_: None, until_empty=True)
    [run] = await influences(config, f"{kit.MODEL}@2", ["capital"])
    assert run.trajectory == "g2-0"
    assert run.influence > 1e-3


async def test_late_runs_are_corrected_or_refused_as_in_the_step(
    broker: Broker, nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    late = {"late": "sequence_truncate", "max_staleness": 0, "late_min_ess": 0.01}

    def with_settings(**settings: Any) -> Config:
        return kit.settings(tiny_base, tmp_path, nats_config, groups_per_step=1, **settings)

    await publish(broker, "v", 0, split="val")
    await publish(broker, "g1", 0)
    await publish(broker, "g2", 1, rewards=(0.0, 1.0, 0.0, 1.0), first=0, old=2)
    await train(with_settings(**late), lambda **_: None, until_empty=True)
    shutil.rmtree(Checkpoints.of(with_settings(), kit.MODEL).path(2))  # the settings that are given count
    corrected, corrected_all, refused = [
        {run.trajectory: run.influence for run in await influences(settings, f"{kit.MODEL}@2", ["capital"])}
        for settings in (
            with_settings(**late),
            with_settings(**{"max_staleness": 1, "loss.importance_sampling": "sequence_truncate"}),
            with_settings(**late | {"late_min_ess": 1.0}),
        )
    ]
    for run in ("g2-0", "g2-1"):
        assert corrected[run] == pytest.approx(corrected_all[run], rel=1e-4)
    assert corrected["g2-3"] != pytest.approx(corrected_all["g2-3"], rel=1e-2)
    assert refused.keys() == {"g2-2", "g2-3"}


async def test_what_one_key_graded_has_no_more_influence_than_in_the_step(
    broker: Broker, nats_config: NatsConfig, tiny_base: str, tmp_path: Path
) -> None:
    config = kit.settings(tiny_base, tmp_path, nats_config, groups_per_step=2)
    await publish(broker, "v", 0, split="val")
    await publish(broker, "mine", 0)
    await publish(broker, "theirs", 0, graders=(Grader(key="ann"),))
    await train(config, lambda **_: None, until_empty=True)
    whole, limited = [
        {run.trajectory: run.influence for run in await influences(settings, f"{kit.MODEL}@1", ["capital"])}
        for settings in (
            msgspec.structs.replace(config, feedback=FeedbackConfig(max_share=share)) for share in (1.0, 0.2)
        )
    ]
    assert limited["mine-1"] == pytest.approx(whole["mine-1"], rel=1e-4)
    assert limited["theirs-1"] == pytest.approx(whole["theirs-1"] / 4, rel=1e-4)
