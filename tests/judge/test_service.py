"""The judge against a real NATS server."""

import contextlib
import functools
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.commands import dead_letters
from pipeline.config import Config, JudgeConfig, JudgeRequestConfig, NatsConfig, RewardConfig
from pipeline.events import (
    DeadLettered,
    GroupDiscarded,
    GroupScored,
    GroupTimedOut,
    Member,
    TrainingBatch,
    TrajectoryCompleted,
    decode,
)
from pipeline.log.broker import Broker
from pipeline.log.messages import StoredMessage
from tests.judge import kit
from tests.judge.kit import groups, judging
from tests.kits.log import acknowledged
from tests.kits.scoring_server import ScoringServer
from tests.kits.waiting import until

completed = functools.partial(kit.completed, reward=0.0)


def settings(nats: NatsConfig, **judge: Any) -> Config:
    return Config(nats=nats, judge=JudgeConfig(**{"group_size": 3, **judge}))


async def drained(broker: Broker) -> None:
    """Return once every trajectory is acknowledged, and every timer."""
    await acknowledged(broker, "judge")


async def timers(broker: Broker, count: int) -> list[StoredMessage]:
    """The `count` timers that are set in the end."""

    async def there() -> list[list[StoredMessage]]:
        found = [m async for m in broker.messages("TIMERS", subject="timer.set.>") if m.payload]
        return [found] if len(found) == count else []

    return (await until(there))[0]


async def publish(broker: Broker, events: Sequence[TrajectoryCompleted]) -> None:
    for event in events:
        await broker.publish(event)


async def test_a_full_group_passes_its_rewards_through_in_the_order_of_the_log(
    broker: Broker, nats_config: NatsConfig
) -> None:
    """Failed members count towards the size, which the event's own overrides. One without a reward is masked."""
    steps = {"first_step": 2, "last_step": 3, "exchanges": 4}
    async with judging(broker, settings(nats_config)):
        await publish(
            broker,
            [
                completed("b", reward=1.0, task="x", group_size=6),
                completed("a", reward=-0.5),
                completed("c", reward=None, rewards={"u": 0.25, "v": 0.5}, metrics={"turns": 4.0}, **steps),
                completed("d", outcome="no_result"),
                completed("e", outcome="masked", reward=9.0),
                completed("f", reward=None),
            ],
        )
        (group,) = await groups(broker, 1)
        await drained(broker)
    assert [(m.trajectory, m.reward, m.outcome, m.completed_seq) for m in group.members] == [
        ("b", 1.0, "scored", 1),
        ("a", -0.5, "scored", 2),
        ("c", 0.75, "scored", 3),
        ("d", 0.0, "no_result", 4),
        ("e", 0.0, "masked", 5),
        ("f", 0.0, "masked", 6),
    ]
    (verdict,) = group.verdicts
    assert (group.task, group.closed_by, group.judge, verdict.judge_model) == ("x", "size", "j", "agent")
    assert [s.trajectory for s in verdict.scores] == ["b", "a", "c"]
    last = group.members[2]
    assert (last.components, last.metrics) == ({"u": 0.25, "v": 0.5, "agent": 0.75}, {"turns": 4.0})
    assert (last.first_step, last.last_step, last.exchanges) == (2, 3, 4)


@pytest.mark.usefixtures("quick_redelivery")
async def test_a_group_closes_at_its_timeout_and_a_later_trajectory_is_recorded_as_late(
    broker: Broker, nats_config: NatsConfig
) -> None:
    await publish(broker, [completed("a", reward=1.0), completed("b")])  # before the judge sets the timer
    async with judging(broker, settings(nats_config, timeout_s=0.2)):
        (group,) = await groups(broker, 1)
        assert (group.closed_by, len(group.members)) == ("timeout", 2)
        await broker.publish(completed("c"))
        (late,) = await groups(broker, 1, "discarded")
        await drained(broker)
    assert (late.reason, late.trajectories, late.by) == ("late", ("c",), "judge")
    async with judging(broker, settings(nats_config, timeout_s=0.2)):  # another life knows it from the log
        await broker.publish(completed("d"))
        await groups(broker, 2, "discarded")
        await drained(broker)
    await groups(broker, 1)


@pytest.mark.parametrize(
    ("members", "detail"),
    [
        ([completed("a", reward=1.0)], "1 of 1 trajectories can be scored, 2 are needed"),
        (
            [completed("a", reward=None), completed("b", reward=None), completed("c")],
            "2 of 3 trajectories carry no reward and judge.model is not set",
        ),
        (
            [completed("a", reward=float("nan")), completed("b")],
            "1 of 2 trajectories carry no reward and judge.model is not set",
        ),
        (
            [completed("a", outcome="no_result"), completed("b", outcome="masked"), completed("c")],
            "1 of 3 trajectories can be scored, 2 are needed",
        ),
        ([completed("a", group="")], "1 of 1 trajectories can be scored, 2 are needed"),
    ],
)
async def test_a_group_that_can_t_be_compared_is_discarded_with_the_reason(
    broker: Broker, nats_config: NatsConfig, members: list[TrajectoryCompleted], detail: str
) -> None:
    await publish(broker, [msgspec.structs.replace(m, at=completed("now").at) for m in members])
    async with judging(broker, settings(nats_config, timeout_s=0.2)):
        (event,) = await groups(broker, 1, "discarded")
        await drained(broker)
    assert (event.reason, event.detail, len(event.trajectories)) == ("too_small", detail, len(members))


@pytest.mark.parametrize(("members", "late"), [(3, []), (2, [("c",)])], ids=["whole", "fewer"])
async def test_the_event_of_a_judge_that_scored_the_group_first_is_kept(
    broker: Broker, nats_config: NatsConfig, members: int, late: list[tuple[str, ...]]
) -> None:
    """That judge died before it acknowledged, or saw fewer runs than there are: these are recorded as late."""
    await publish(broker, [completed("a"), completed("b"), completed("c")])
    seen = tuple(Member(trajectory=name, reward=0.0) for name in "abc"[:members])
    await broker.publish(GroupScored(project="p", group="g", model="m", judge="j", members=seen))
    async with judging(broker, settings(nats_config), "another"):
        await drained(broker)
    assert [g.judge for g in await groups(broker, 1)] == ["j"]
    assert [g.trajectories for g in await groups(broker, len(late), "discarded")] == late


async def test_a_group_whose_timer_comes_while_it_is_full_is_left_to_its_closing_member(
    broker: Broker, nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless nobody scores it: its size was another when the member was acknowledged."""
    monkeypatch.setattr("judge.service._SCORING_ACK_WAITS", 0.01)
    async with judging(broker, settings(nats_config, group_size=4)):
        await publish(broker, [completed("a"), completed("b"), completed("c")])
        await drained(broker)
    async with judging(broker, settings(nats_config, group_size=3)):
        assert await broker.read(GroupScored) == []
        (left,) = await timers(broker, 1)
        timeout = decode(left.payload)
        assert isinstance(timeout, GroupTimedOut)
        await broker.set_timer(timeout, 0.0)
        (group,) = await groups(broker, 1)
        await drained(broker)
    assert (group.closed_by, len(group.members)) == ("size", 3)


async def test_the_deadline_of_a_group_follows_the_clock_of_the_log_alone(nats_config: NatsConfig) -> None:
    """A gateway's clock was an hour behind: its groups were closed at once. Ahead: they waited an hour longer."""
    now = completed("x").at
    async with Broker.connect(nats_config) as broker, judging(broker, settings(nats_config, timeout_s=600)):
        for group, at in (("behind", now - 3_600_000_000), ("ahead", now + 3_600_000_000)):
            ack = await broker.publish(completed("a", group, at=at))
            (message,) = [m async for m in broker.messages(ack.stream, ack.seq, ack.seq)]
            (timer,) = [t for t in await timers(broker, 1) if group in t.subject]
            due = datetime.fromisoformat(timer.headers["Nats-Schedule"].removeprefix("@at "))
            assert round(due.timestamp() * 1e6) == message.place.at + 600_000_000
            await broker.cancel_timer(decode(timer.payload))
            await timers(broker, 0)


async def test_a_dead_letter_of_a_full_group_is_retried_to_a_verdict(
    broker: Broker, nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The judge died twice of the group, so the completion that filled it became a dead letter."""

    async def fail(*_: Any, **__: Any) -> GroupScored:
        raise AssertionError("a fault of the judge")

    await publish(broker, [completed("a"), completed("b"), completed("c")])
    with monkeypatch.context() as patch:
        patch.setattr("judge.service.score_closed", fail)
        with anyio.fail_after(60):
            while not (letters := await broker.read(DeadLettered)):
                with contextlib.suppress(BaseExceptionGroup):
                    async with judging(broker, settings(nats_config)):
                        await drained(broker)
    async with judging(broker, settings(nats_config)):
        await drained(broker)
        await dead_letters.retry(broker, letters[0])
        (group,) = await groups(broker, 1)
        await drained(broker)
    assert {m.trajectory for m in group.members} == set("abc")
    assert await broker.read(GroupDiscarded) == []


async def test_a_judge_that_was_down_reads_its_backlog_before_it_closes_groups(
    broker: Broker, nats_config: NatsConfig
) -> None:
    old = completed("x").at - 3_600_000_000
    first = [completed(f"a{i}", f"g{i}", at=old) for i in range(300)]
    second = [completed(f"b{i}", f"g{i}", at=old + 60_000_000) for i in range(300)]
    await publish(broker, first + second)
    async with judging(broker, settings(nats_config, group_size=2, timeout_s=120)):
        found = await groups(broker, 300)
        await drained(broker)
    assert {g.closed_by for g in found} == {"size"}


async def test_the_trainer_gets_every_group_of_a_batch(broker: Broker, nats_config: NatsConfig) -> None:
    """It waits for all of them, so one that can't be compared is not discarded here."""
    batch = TrainingBatch(id="b", groups=("full", "small"), settings=b'{"optimizer.learning_rate":0.5}')
    async with judging(broker, settings(nats_config)):
        await publish(broker, [completed(f"f{n}", "full", reward=n / 2, batch=batch) for n in range(3)])
        small = {"group_size": 2, "batch": batch}
        await publish(broker, [completed("s0", "small", reward=1.0, **small)])
        await publish(broker, [completed("s1", "small", reward=None, outcome="no_result", **small)])
        scored: list[GroupScored] = sorted(await groups(broker, 2), key=lambda g: g.group)
        await drained(broker)
    assert await broker.read(GroupDiscarded) == []
    assert [(g.group, g.batch) for g in scored] == [("full", batch), ("small", batch)]
    members = [(m.trajectory, m.outcome, m.reward) for m in scored[1].members]
    assert members == [("s0", "scored", 1.0), ("s1", "no_result", 0.0)]


@kit.IMPORTS_LITELLM
async def test_a_group_whose_judge_model_never_answers_is_recorded(broker: Broker, nats_config: NatsConfig) -> None:
    async with ScoringServer(lambda _: 500).run() as server:
        model = {"model": "openai/scorer", "api_base": server.url, "retry_for_s": 0.5}
        once, rewards = JudgeRequestConfig(retries=0), (RewardConfig(name="score", kind="ruler"),)
        async with judging(broker, settings(nats_config, **model, request=once, rewards=rewards, group_size=2)):
            for name in "ab":
                await broker.publish(kit.exchange(name, "quality=0.5"))
                await broker.publish(completed(name, exchanges=1))
            (event,) = await groups(broker, 1, "discarded")
            await drained(broker)
    assert event.reason == "unscored"
    assert "InternalServerError" in event.detail
