"""Signals become rewards, rewards of calls and hints: against a real NATS server."""

import itertools
import time
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import pytest

from judge.commands.rejudge import Rejudge
from judge.feedback import RunFeedback, feedback_on
from judge.groups import GroupKey
from judge.rewards.compose import open_composer, open_composer_on_log
from judge.service import Judge
from pipeline.commands.status import read_log
from pipeline.config import Config, FeedbackConfig, JudgeConfig, NatsConfig, RewardConfig
from pipeline.events import AnyEvent, FeedbackTimedOut, Hint, SignalGiven
from pipeline.log.broker import Broker
from pipeline.log.messages import StoredMessage
from pipeline.security.signing import Trust
from tests.judge import test_groups
from tests.judge.kit import completed, groups, judging, loading
from tests.judge.test_service import drained, timers
from tests.kits.waiting import until

_ids = itertools.count()
RESULT = RewardConfig(name="result", kind="feedback")


def signal(trajectory: str, value: float | None = None, **fields: Any) -> SignalGiven:
    values = {"group": trajectory, "name": "result", "by": "desk", "signal": f"s{next(_ids)}", **fields}
    return SignalGiven(project="p", model="m", trajectory=trajectory, value=value, **values)


def run(trajectory: str, group: str = "", **fields: Any) -> Any:
    return completed(trajectory, group, **fields)


def settings(
    nats: NatsConfig, *rewards: RewardConfig, wait_s: float = 0.0, late: Any = "train", **judge: Any
) -> Config:
    values = {"min_size": 1, "rewards": rewards or (RESULT,), **judge}
    return Config(
        project="p", nats=nats, judge=JudgeConfig(**values), feedback=FeedbackConfig(wait_s=wait_s, late=late)
    )


async def end_wait(broker: Broker, group: str) -> None:
    """Let the deadline for a group's feedback be now."""
    due = FeedbackTimedOut(project="p", model="m", group=group, wait_s=600)
    await broker.set_timer(due, time.time())


async def test_a_group_may_wait_for_whatever_is_said_until_its_time_is_over(nats_config: NatsConfig) -> None:
    """So words after the result are hints. By default the group is scored with the result."""
    config = settings(nats_config, wait_s=600)
    whole = msgspec.structs.replace(config, feedback=FeedbackConfig(wait_s=600, wait_for="all"))
    async with Broker.connect(nats_config) as broker, judging(broker, whole):
        await broker.publish(signal("a", 1.0))
        await broker.publish(run("a"))
        await broker.publish(signal("a", text="the other account", kind="text"))
        await timers(broker, 1)
        await drained(broker)
        assert await groups(broker, 0) == []
        await end_wait(broker, "a")
        (group,) = await groups(broker, 1)
    assert group.members[0].reward == 1.0
    assert group.members[0].hints == (Hint(call=-1, text="the other account", by="desk"),)


async def test_a_run_waits_for_the_keys_that_its_reward_names_and_any_judge_scores_it(
    broker: Broker, nats_config: NatsConfig
) -> None:
    """Else any key of role `feedback` could speak before the one that knows the result."""
    named = RewardConfig(name="result", kind="feedback", by=("desk",))
    config = settings(nats_config, named, wait_s=600)
    async with judging(broker, config):
        await broker.publish(signal("a", 0.0, by="mole"))
        await broker.publish(run("a"))
        await broker.publish(signal("a", -1.0, by="mole"))
        await broker.publish(signal("a", -1.0, by="mole", call=0))
        await timers(broker, 1)
        await drained(broker)
        assert await groups(broker, 0) == []
    said = await read_log(nats_config, Trust(config.signing), "p")
    assert said["waiting"] == {"members": 0, "feedback": 1}
    async with judging(broker, config):
        await broker.publish(signal("a", 0.75))
        (group,) = await groups(broker, 1)
        await drained(broker)
        await timers(broker, 0)
    async with open_composer_on_log(config, broker) as composer:
        await Rejudge(broker, config, composer, branch="b").run()
    again = [g for g in await groups(broker, 2) if g.branch == "b"]
    for scored in (group, *again):
        (member,) = scored.members
        assert (member.reward, member.call_rewards, member.graded_by) == (0.75, {}, ("desk",))
    assert len(again) == 1


async def test_without_feedback_a_run_ends_unscored_at_the_deadline_and_late_feedback_scores_it_once(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as broker, judging(broker, settings(nats_config, wait_s=0.2)):
        await broker.publish(run("a"))
        (event,) = await groups(broker, 1, "discarded")
        assert (event.reason, event.detail) == ("unscored", "reward result is missing for 1 of 1")
        await broker.publish(signal("a", text="no number", kind="text"))
        await drained(broker)
        await broker.publish(signal("a", 1.0))
        (group,) = await groups(broker, 1)
        assert group.members[0].hints == (Hint(call=-1, text="no number", by="desk"),)
        await broker.publish(signal("a", -1.0))
        await drained(broker)
        (group,) = await groups(broker, 1)
        assert group.members[0].reward == 1.0
        await groups(broker, 1, "discarded")


@pytest.mark.parametrize("late", ["train", "record"])
async def test_late_feedback_that_gives_no_reward_has_nothing_judged_again(
    nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """One key could have a discarded group judged again by each of a thousand words, at the judge model's price. And
    none has where late feedback is recorded only."""
    scored = mock.Mock(wraps=Judge._begin_scoring)
    monkeypatch.setattr(Judge, "_begin_scoring", lambda *given: scored(*given))
    named = RewardConfig(name="result", kind="feedback", by=("desk",))
    config = settings(nats_config, named, wait_s=0.2, late=late)
    async with Broker.connect(nats_config) as broker, judging(broker, config):
        await broker.publish(run("a"))
        await groups(broker, 1, "discarded")
        await drained(broker)
        before = scored.call_count
        await broker.publish(signal("a", text="no number", kind="text"))
        for other in ({"name": "stars"}, {"by": "mole"}, {"call": 0}):
            await broker.publish(signal("a", 1.0, **other))
        await drained(broker)
        assert scored.call_count == before
        await broker.publish(signal("a", 1.0))
        await drained(broker)
        await groups(broker, late == "train")
        assert scored.call_count == before + (late == "train")


async def overdue_timers(broker: Broker) -> list[StoredMessage]:
    return [m async for m in broker.messages("TIMERS", subject="timer.set.rollout.overdue.>")]


async def test_a_group_that_timed_out_waits_too(nats_config: NatsConfig) -> None:
    config = settings(nats_config, wait_s=600, group_size=3, timeout_s=0.2)
    async with Broker.connect(nats_config) as broker, judging(broker, config):
        await broker.publish(completed("a", "g"))
        await until(partial(overdue_timers, broker))
        await broker.publish(signal("a", 1.0, group="g"))
        (group,) = await groups(broker, 1)
    assert (group.closed_by, group.members[0].reward) == ("timeout", 1.0)


async def test_a_judge_that_waits_no_longer_scores_what_waited_when_its_timer_is_due(
    broker: Broker, nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("judge.service._SCORING_ACK_WAITS", 0.01)
    agent = RewardConfig(name="reward")
    async with judging(broker, settings(nats_config, wait_s=600)):
        await broker.publish(run("a", reward=0.5))
        await timers(broker, 1)
        await drained(broker)
    await end_wait(broker, "a")
    async with judging(broker, settings(nats_config, agent)):
        (group,) = await groups(broker, 1)
    assert group.members[0].reward == 0.5


@pytest.mark.parametrize(
    ("combine", "default", "reward", "without"),
    [("mean", None, 0.75, None), ("min", 1.0, 0.5, 1.0), ("product", -1.0, 0.5, -1.0), ("sum", 0.0, 1.5, 1.0)],
)
async def test_feedback_is_one_part_of_a_reward_or_a_veto(
    combine: Any, default: float | None, reward: float, without: float | None
) -> None:
    rewards = (RewardConfig(name="result", kind="feedback", default=default), RewardConfig(name="own"))
    members = [run("a", rewards={"own": 1.0}), run("b", rewards={"own": 1.0})]
    async with open_composer(Config(judge=JudgeConfig(rewards=rewards, combine=combine)), loading(())) as composer:
        assert composer is not None
        found = await composer(members, [signal("a", 0.5)])
    assert (found.final["a"], found.final.get("b")) == (reward, without)
    assert found.components["a"] == {"own": 1.0, "agent": 1.0, "result": 0.5}


def read(*events: AnyEvent, awaited: frozenset[str] = frozenset({"result"}), until: int = 0) -> tuple[int, int, int]:
    """Where the group was closed and ready, and how many signals count. The events have the sequences 1, 2, …"""
    found = test_groups.read(*events, key=GroupKey("p", "m", "a", "train"), awaited=awaited, until=until)
    return found.closed_at, found.ready_at, len(found.group.signals)


OVERDUE = FeedbackTimedOut(project="p", model="m", group="a")


def test_the_log_alone_says_when_a_group_is_ready() -> None:
    said, about_a_call = signal("a", 1.0), signal("a", 1.0, call=0)
    assert read(run("a")) == (1, 0, 0)
    assert read(run("a"), awaited=frozenset()) == (1, 1, 0)
    assert read(run("a"), said) == (1, 2, 1)
    assert read(said, run("a")) == (2, 2, 1)
    assert read(run("a"), about_a_call) == (1, 0, 1)
    assert read(run("a"), signal("a", 1.0, name="other"), OVERDUE) == (1, 3, 1)
    assert read(run("a"), signal("b", 1.0), signal("a", kind="text", text="x")) == (1, 0, 1)
    assert read(OVERDUE, run("a")) == (2, 0, 0)
    assert read(run("a", outcome="no_result")) == (1, 1, 0)
    failed, other = run("c", group="a", outcome="no_result", group_size=3), run("b", group="a")
    assert read(run("a"), said, other, signal("b", 1.0, group="a")) == (1, 2, 1)  # a run of its own was closed at once
    assert read(failed, other, run("a"), said) == (3, 0, 1)
    assert read(failed, other, run("a"), said, signal("b", 0.0, group="a")) == (3, 5, 2)
    later = run("a"), said, said, said
    assert (read(*later), read(*later, until=3)) == ((1, 2, 1), (1, 2, 2))


def test_the_last_number_of_each_key_counts_and_keys_are_averaged() -> None:
    member, config = (
        run("a", owner="agent"),
        JudgeConfig(rewards=(RewardConfig(name="result", kind="feedback", weight=2.0),)),
    )
    said = [
        signal("a", 1.0, by="x"),
        signal("a", 0.0, by="x"),
        signal("a", 1.0, by="y"),
        signal("a", 0.5, call=2),
        signal("a", 1.0, call=2, name="other"),
        signal("a", 1.0, call=1, name="reward", by="agent"),
        signal("a", -1.0, call=1, name="reward", by="x"),
        signal("a", text="Not there.", kind="text", call=1),
        signal("a", text="b2", kind="correction", name="right"),
        signal("a", 1e300, by="z"),
        signal("b", 1.0),
    ]
    known = {"a": RunFeedback({"2": 0.5}, (Hint(call=2, text="No."),)), "c": RunFeedback({"0": 1.0})}
    found = feedback_on([member], said, config, known)
    assert found["a"].call_rewards == {"1": 1.0, "2": 1.5}
    assert found["a"].hints == (
        Hint(call=2, text="No."),
        Hint(call=1, text="Not there.", by="desk"),
        Hint(call=-1, text="b2", kind="correction", by="desk"),
    )
    assert found["a"].graded_by == ("desk", "x", "y")
    assert found["c"] == known["c"]
    assert feedback_on([member], [], config, {}) == {}


async def test_a_run_with_hints_and_no_reward_is_scored_zero_for_its_teacher(nats_config: NatsConfig) -> None:
    """Hints are a lesson (`trainer.distill`), whatever else is known. Without any, and without a reward, a run is
    discarded."""
    config = Config(project="p", nats=nats_config, judge=JudgeConfig(min_size=1))
    async with Broker.connect(nats_config) as broker, judging(broker, config):
        await broker.publish(signal("a", call=1, kind="text", text="play b2"))
        await broker.publish(run("a"))
        await broker.publish(run("b"))
        (group,) = await groups(broker, 1)
        await drained(broker)
    (member,) = group.members
    assert (member.trajectory, member.outcome, member.reward) == ("a", "scored", 0.0)
    assert member.hints == (Hint(call=1, text="play b2", by="desk"),)
