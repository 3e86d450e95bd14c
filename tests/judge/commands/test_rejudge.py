"""`journeywork rejudge`: history is scored again, on another branch."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from judge.commands.rejudge import Rejudge
from judge.errors import UnscoredError
from judge.rewards.compose import RULER, ConfiguredComposer, open_composer_on_log
from judge.ruler.transcripts import load_transcript
from judge.scoring import GroupRewards, agent_rewards
from pipeline import config as configuration
from pipeline import crash
from pipeline.config import Config, ConfigError, JudgeConfig, NatsConfig, RewardConfig
from pipeline.events import GroupScored, SignalGiven, TrainingBatch, TrajectoryCompleted
from pipeline.log.broker import Broker
from tests.judge.kit import Model, completed, exchange, groups, judging, ruler
from tests.kits.scoring_server import Scorer
from trainer.requested import RequestedBatches


async def history(broker: Broker, config: Config) -> None:
    """Two groups whose agents' rewards are the other way round than the quality of what they did."""
    async with judging(broker, config):
        for scored, group in enumerate(("g0", "g1"), 1):
            for i in range(3):
                await broker.publish(exchange(f"{group}-{i}", f"quality=0.{i + 1}"))
                await broker.publish(completed(f"{group}-{i}", group, reward=1 - i / 10, exchanges=1))
            await groups(broker, scored)


def composer(broker: Broker, config: Config, model: Model) -> ConfiguredComposer:
    judge = ruler(model)

    async def read(member: TrajectoryCompleted) -> object:
        return await load_transcript(broker, member.project, member.trajectory)

    judge._load = read  # type: ignore[assignment]
    judges: Any = {"ruler": judge}
    return ConfiguredComposer(config.judge.replace(rewards=(RULER,)), judges, {}, read)


async def test_verdicts_of_another_judge_are_published_on_their_own_branch(
    broker: Broker, nats_config: NatsConfig
) -> None:
    config = Config(project="p", nats=nats_config, judge=JudgeConfig(group_size=3, model="test/judge"))
    await history(broker, config)
    model = Model(Scorer())
    report = await Rejudge(broker, config, composer(broker, config, model)).run()
    assert (report.rejudged, report.skipped, report.failed, report.gone) == (2, 0, 0, 0)
    found = await groups(broker, 4)
    new = next(g for g in found if g.branch != "main" and g.group == "g1")
    assert new.branch == f"judge-{new.judge}"
    assert (new.origin, new.closed_by, new.offline) == ("main/2", "replay", True)
    assert {m.trajectory: m.reward for m in new.members} == pytest.approx({"g1-0": 0.1, "g1-1": 0.2, "g1-2": 0.3})
    assert new.members[0].components["agent"] == 1.0
    calls = len(model.requests)
    again = await Rejudge(broker, config, composer(broker, config, model)).run()
    assert (again.rejudged, again.skipped, len(model.requests)) == (0, 2, calls)
    await groups(broker, 4)


async def test_on_main_each_group_trains_once_under_each_verdict_set(broker: Broker, nats_config: NatsConfig) -> None:
    """Also where the command dies after its first group, and where other verdict sets were made meanwhile. Here
    people's labels, which came late, become the rewards."""
    labels = (RewardConfig(name="label", kind="feedback", default=0.5),)
    config = Config(project="p", nats=nats_config, judge=JudgeConfig(group_size=3))
    await history(broker, config)
    for run, value in (("g1-0", 0.0), ("g1-2", 1.0)):
        about = {"group": "g1", "name": "label", "by": "ann", "signal": run}
        await broker.publish(SignalGiven(project="p", model="m", trajectory=run, value=value, **about))
    later = msgspec.structs.replace(config, judge=JudgeConfig(group_size=3, rewards=labels))
    for branch in ("main", "b"):
        with pytest.raises(ConfigError, match="only groups of main can be judged again on main"):
            Rejudge(broker, later, None, branch=branch, from_branch="b")
    async with open_composer_on_log(later, broker) as judge:
        done = []
        for verdicts, limit in (("one", 1), ("one", 0), ("two", 0), ("one", 0), ("two", 0)):
            made = Rejudge(broker, later, judge, branch="main", verdicts=verdicts)
            done.append((await made.run(limit)).rejudged)
        assert done == [1, 1, 2, 0, 0]
        newest = [r.event.at for r in await broker.read(GroupScored) if not r.event.origin][-1]
        ranged = Rejudge(broker, later, judge, branch="main", verdicts="three")
        assert ((await ranged.run(since=newest + 1)).rejudged, (await ranged.run(since=newest)).rejudged) == (0, 1)
    found = await groups(broker, 7)
    sets = sorted((g.group, g.judge) for g in found if g.offline)
    assert sets == [("g0", "one"), ("g0", "two"), ("g1", "one"), ("g1", "three"), ("g1", "two")]
    assert {g.origin for g in found if g.offline} == {"main/1", "main/2"}
    assert {g.branch for g in found} == {"main"}
    labelled = {g.group: [(m.reward, m.graded_by) for m in g.members] for g in found if g.judge == "two"}
    assert labelled == {"g0": [(0.5, ())] * 3, "g1": [(0.0, ("ann",)), (0.5, ()), (1.0, ("ann",))]}


async def test_a_command_that_is_killed_goes_on_where_it_stopped(
    broker: Broker, nats_config: NatsConfig, tmp_path: Path
) -> None:
    config = Config(project="p", nats=nats_config, run_dir=str(tmp_path), judge=JudgeConfig(group_size=3))
    configuration.save(config, tmp_path / "config.toml")
    arguments = ["--run-dir", str(tmp_path), "--set", f"nats.url={nats_config.url}"]
    arguments += ["--branch", "main", "--verdicts", "labels"]
    # Groups are published beside each other: the second death may leave both on the log, and the third run ends alone.
    deaths = ("broker.before_publish:1", "broker.after_publish:1", "broker.after_publish:1", "")
    await history(broker, config)
    codes = []
    for death in deaths:
        process = await anyio.run_process(
            [sys.executable, "-m", "judge.commands.rejudge", *arguments],
            env=os.environ | {crash.VARIABLE: death},
            check=False,
        )
        codes.append(process.returncode)
    assert (codes[:2], codes[2] in (-9, 0), codes[3]) == ([-9, -9], True, 0)
    assert b"; 2 were there already," in process.stdout
    found = [g for g in await groups(broker, 4) if g.offline]
    assert sorted((g.group, g.judge, g.branch) for g in found) == [("g0", "labels", "main"), ("g1", "labels", "main")]


async def test_the_batch_of_a_rejudged_group_names_only_what_is_judged_again_with_it(
    broker: Broker, nats_config: NatsConfig
) -> None:
    config = Config(project="p", nats=nats_config, judge=JudgeConfig(group_size=2))
    batch = TrainingBatch(id="b", groups=("g0", "g1", "g2"))
    async with judging(broker, config):
        for scored, group in enumerate(batch.groups, 1):
            for i in range(2):
                await broker.publish(completed(f"{group}-{i}", group, reward=float(i), batch=batch))
            await groups(broker, scored)
    for limit in (1, 0):
        await Rejudge(broker, config, None, branch="b").run(limit)
    judged = [g for g in await groups(broker, 6) if g.branch == "b"]
    named = {g.group: g.batch.groups for g in judged if g.batch is not None}
    assert named == {"g0": ("g0", "g1"), "g1": ("g0", "g1"), "g2": ("g2",)}


async def test_a_batch_on_a_branch_does_not_wait_for_groups_that_no_judge_could_score(
    broker: Broker, nats_config: NatsConfig
) -> None:
    """The trainer waited `trainer.batch_timeout_s` for them, then discarded the others. `small` is named by the batch,
    and its runs name none."""
    config = Config(project="p", nats=nats_config, judge=JudgeConfig(group_size=2, min_size=2))
    batch = TrainingBatch(id="b", groups=("good", "failing", "few", "none", "void", "small"))
    rewards: dict[str, tuple[float | None, ...]] = {
        "good": (0.0, 1.0),
        "failing": (0.0, 1.0),
        "few": (0.0, None),
        "none": (None, None),
        "void": (None, None),
        "small": (None, None),
    }
    async with judging(broker, config):
        for group, of_runs in rewards.items():
            for i, reward in enumerate(of_runs):
                named = {"batch": None if group == "small" else batch}
                outcome: Any = "no_result" if group == "void" else "scored"
                await broker.publish(completed(f"{group}-{i}", group, reward=reward, outcome=outcome, **named))
        await groups(broker, 5)
        await groups(broker, 1, "discarded")

    class Composer:
        async def __call__(
            self, members: Sequence[TrajectoryCompleted], signals: Sequence[SignalGiven] = ()
        ) -> GroupRewards:
            if members[0].group == "failing":
                raise UnscoredError("no answer")
            return agent_rewards(members)

    report = await Rejudge(broker, config, Composer(), branch="b").run()
    assert (report.rejudged, report.failed) == (4, 1)
    scored = {g.group: g for g in await groups(broker, 9) if g.branch == "b"}
    assert {m.trajectory: m.outcome for m in scored["few"].members} == {"few-0": "scored", "few-1": "masked"}
    found = [g for g in await groups(broker, 3, "discarded") if g.by == "rejudge"]
    assert {(g.group, g.reason, g.branch, g.judge) for g in found} == {
        ("failing", "unscored", "b", report.verdict_set),
        ("small", "too_small", "b", report.verdict_set),
    }
    requested = RequestedBatches(broker, "trainer", 60.0)
    await requested.begin(scored["good"])
    (begun,) = requested._batches.values()
    assert begun.settled == set(batch.groups) - set(scored)

    # A group of main trains under the verdicts that it has.
    on_main = await Rejudge(broker, config, Composer(), branch="main", verdicts="again").run()
    assert (on_main.rejudged, on_main.failed) == (1, 4)
    await groups(broker, 3, "discarded")
    again = await Rejudge(broker, config, None, branch="b").run()  # failed ones are tried again
    assert (again.rejudged, again.skipped) == (1, 4)


async def test_groups_whose_history_is_gone_are_recorded_as_discarded(broker: Broker, nats_config: NatsConfig) -> None:
    config = Config(project="p", nats=nats_config, judge=JudgeConfig(group_size=3, model="test/judge"))
    await history(broker, config)
    await broker.js.delete_msg("ROLLOUTS", 2)
    report = await Rejudge(broker, config, composer(broker, config, Model(Scorer())), branch="b").run()
    assert (report.rejudged, report.gone) == (1, 1)
    (gone,) = await groups(broker, 1, "discarded")
    assert (gone.reason, gone.branch, gone.by) == ("history_gone", "b", "rejudge")
    assert gone.judge == report.verdict_set
