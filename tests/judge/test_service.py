"""The judge against a real NATS server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import msgspec
import pytest

from judge.service import Judge
from pipeline.config import Config, JudgeConfig, NatsConfig
from pipeline.events import GroupDiscarded, GroupScored, TrainingBatch, TrajectoryCompleted
from pipeline.log.broker import Broker
from tests.judge.kit import groups, judging

pytestmark = pytest.mark.anyio


def completed(
    trajectory: str, group: str = "g", reward: float | None = 0.0, **fields: Any
) -> TrajectoryCompleted:
    return TrajectoryCompleted(
        project="p", trajectory=trajectory, model="m", group=group, reward=reward, **fields
    )


def settings(nats: NatsConfig, **judge: Any) -> Config:
    return Config(nats=nats, judge=JudgeConfig(**{"group_size": 3, **judge}))


async def drained(broker: Broker) -> None:
    """Every trajectory is acknowledged."""
    with anyio.fail_after(20):
        while await broker.lag("judge"):
            await anyio.sleep(0.02)


async def publish(broker: Broker, events: Sequence[TrajectoryCompleted]) -> None:
    for event in events:
        await broker.publish(event)


async def test_a_full_group_passes_its_rewards_through_in_the_order_of_the_log(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as broker:
        async with judging(broker, settings(nats_config)):
            await publish(
                broker,
                [
                    completed("b", reward=1.0, task="x"),
                    completed("a", reward=-0.5),
                    completed(
                        "c",
                        reward=None,
                        rewards={"u": 0.25, "v": 0.5},
                        first_step=2,
                        last_step=3,
                        exchanges=4,
                    ),
                ],
            )
            (group,) = await groups(broker, 1)
            await drained(broker)
        assert isinstance(group, GroupScored)
        assert [(m.trajectory, m.reward, m.completed_seq) for m in group.members] == [
            ("b", 1.0, 1),
            ("a", -0.5, 2),
            ("c", 0.75, 3),
        ]
        assert (group.task, group.closed_by, group.judge, group.verdicts[0].judge_model) == (
            "x",
            "size",
            "j",
            "agent",
        )
        last = group.members[2]
        assert (last.components, last.first_step, last.last_step, last.exchanges) == (
            {"u": 0.25, "v": 0.5, "agent": 0.75},
            2,
            3,
            4,
        )


async def test_the_event_s_group_size_overrides_the_setting_and_failed_members_count_towards_it(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as broker, judging(broker, settings(nats_config)):
        await publish(
            broker,
            [
                completed("a", reward=1.0, group_size=4),
                completed("b", outcome="no_result", reward=0.0),
                completed("c", outcome="masked", reward=9.0),
                completed("d", reward=0.5),
            ],
        )
        (group,) = await groups(broker, 1)
    assert [(m.outcome, m.reward) for m in group.members] == [
        ("scored", 1.0),
        ("no_result", 0.0),
        ("masked", 0.0),
        ("scored", 0.5),
    ]
    assert [s.trajectory for s in group.verdicts[0].scores] == ["a", "d"]


async def test_validation_is_a_group_of_its_own_and_needs_no_second_member(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker, judging(broker, settings(nats_config)):
        await publish(
            broker,
            [
                completed("v", split="val", reward=0.4, group_size=1),
                completed("a"),
                completed("b"),
                completed("c"),
            ],
        )
        found = await groups(broker, 2)
        await drained(broker)
    assert [(g.split, [m.trajectory for m in g.members]) for g in found] == [
        ("val", ["v"]),
        ("train", ["a", "b", "c"]),
    ]
    assert found[0].subject() != found[1].subject()


async def test_a_group_closes_at_its_timeout_and_a_later_trajectory_is_recorded_as_late(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as broker:
        async with judging(broker, settings(nats_config, timeout_s=0.2)):
            await publish(broker, [completed("a", reward=1.0), completed("b")])
            (group,) = await groups(broker, 1)
            assert (group.closed_by, len(group.members)) == ("timeout", 2)
            await broker.publish(completed("c"))
            (late,) = await groups(broker, 1, "discarded")
            await drained(broker)
        assert isinstance(late, GroupDiscarded)
        assert (late.reason, late.trajectories, late.by) == ("late", ("c",), "judge")
        async with judging(
            broker, settings(nats_config, timeout_s=0.2)
        ):  # another life knows it from the log
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
)  # fmt: skip
async def test_a_group_that_can_t_be_compared_is_discarded_with_the_reason(
    nats_config: NatsConfig, members: list[TrajectoryCompleted], detail: str
) -> None:
    async with Broker.connect(nats_config) as broker, judging(broker, settings(nats_config, timeout_s=0.2)):
        await publish(broker, [msgspec.structs.replace(m, at=completed("now").at) for m in members])
        (event,) = await groups(broker, 1, "discarded")
        await drained(broker)
    assert (event.reason, event.detail, len(event.trajectories)) == ("too_small", detail, len(members))


async def test_members_without_a_reward_are_masked_where_the_rest_can_be_compared(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as broker, judging(broker, settings(nats_config)):
        await publish(broker, [completed("a", reward=1.0), completed("b", reward=None), completed("c")])
        (group,) = await groups(broker, 1)
    assert [m.outcome for m in group.members] == ["scored", "masked", "scored"]


async def test_a_group_id_that_no_subject_can_hold_is_scored_under_its_hash(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker, judging(broker, settings(nats_config)):
        await publish(broker, [completed(t, "two\nlines " + "x" * 300, reward=1.0) for t in "abc"])
        (group,) = await groups(broker, 1)
        await drained(broker)
    assert group.group.startswith("hashed-")
    assert len(group.members) == 3


async def test_an_open_group_is_rebuilt_after_a_restart(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [completed("a"), completed("b", reward=1.0)])
        async with judging(broker, settings(nats_config)) as judge:
            with anyio.fail_after(10):
                while judge._assembler.next_deadline() == float("inf"):
                    await anyio.sleep(0.02)
        async with judging(broker, settings(nats_config)):
            await broker.publish(completed("c"))
            (group,) = await groups(broker, 1)
        assert {m.trajectory for m in group.members} == {"a", "b", "c"}


async def test_a_redelivered_member_of_a_scored_group_is_acknowledged_and_neither_scored_again_nor_late(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [completed("a"), completed("b"), completed("c")])
        async with broker.consume(
            "judge"
        ) as messages:  # a judge that published and died before it acknowledged
            held = await messages.batch(3)
            judge = Judge(broker, settings(nats_config), None, "j")
            for group in await judge._assemble(held[:3]):
                for arrival in group.arrivals.values():
                    arrival.deliveries.clear()
                await judge._score_and_publish(group)
        async with judging(broker, settings(nats_config)):
            await drained(broker)
        await groups(broker, 1)
        assert await broker.read(GroupDiscarded) == []


async def test_the_event_of_another_judge_that_scored_the_group_first_is_adopted(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as broker:
        judge = Judge(broker, settings(nats_config), None, "j")
        await publish(broker, [completed("a"), completed("b"), completed("c")])
        async with broker.consume("judge") as messages:
            (group,) = await judge._assemble(await messages.batch(3))
            other = replace(group, arrivals={t: a for t, a in group.arrivals.items() if t != "c"})
            other.arrivals = {t: replace(a, deliveries=[]) for t, a in other.arrivals.items()}
            await judge._score_and_publish(other)
            await judge._score_and_publish(group)
        await drained(broker)
        await groups(broker, 1)
        (late,) = await groups(broker, 1, "discarded")
        assert late.trajectories == ("c",)


async def test_a_judge_that_was_down_reads_its_backlog_before_it_closes_groups(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as broker:
        old = completed("x").at - 3_600_000_000
        first = [completed(f"a{i}", f"g{i}", at=old) for i in range(300)]
        second = [completed(f"b{i}", f"g{i}", at=old + 60_000_000) for i in range(300)]
        await publish(broker, first + second)
        async with judging(broker, settings(nats_config, group_size=2, timeout_s=120)):
            found = await groups(broker, 300)
            await drained(broker)
        assert {g.closed_by for g in found} == {"size"}


async def test_the_trainer_gets_every_group_of_a_batch(nats_config: NatsConfig) -> None:
    """It waits for all of them, so one that can't be compared is not discarded here."""
    batch = TrainingBatch(id="b", groups=("full", "small"), learning_rate=0.5)
    async with Broker.connect(nats_config) as broker:
        async with judging(broker, settings(nats_config)):
            await publish(broker, [completed(f"f{n}", "full", n / 2, batch=batch) for n in range(3)])
            small = {"group_size": 2, "batch": batch}
            await publish(broker, [completed("s0", "small", 1.0, **small)])
            await publish(broker, [completed("s1", "small", None, outcome="no_result", **small)])
            scored: list[GroupScored] = await groups(broker, 2)
            await drained(broker)
        assert await broker.read(GroupDiscarded) == []
    assert [(g.group, g.batch) for g in scored] == [("full", batch), ("small", batch)]
    assert [(m.trajectory, m.outcome, m.reward) for m in scored[1].members] == [
        ("s0", "scored", 1.0), ("s1", "no_result", 0.0)
    ]  # fmt: skip
