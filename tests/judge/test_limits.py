"""A judge over budget discards groups, until the budget is not used up any more."""

from typing import Any, Literal

from judge.commands.rejudge import Rejudge
from pipeline.config import BudgetConfig, Config, JudgeConfig, NatsConfig
from pipeline.events import AlarmChanged, TrainingBatch
from pipeline.log.broker import Broker
from pipeline.names import split_point
from tests.judge.kit import completed, groups, judging

DETAIL = "5 of 5 USD are spent (budget.judge_usd)"


def settings(nats: NatsConfig, **budget: Any) -> Config:
    return Config(
        project="p", nats=nats, judge=JudgeConfig(group_size=2), budget=BudgetConfig(**({"judge_usd": 5.0} | budget))
    )


async def tell(broker: Broker, state: Literal["raised", "cleared"], alarm: str = "over_judge_budget") -> None:
    await broker.publish(AlarmChanged(project="p", alarm=alarm, state=state, detail=DETAIL, since=1))


async def play(broker: Broker, group: str, **more: Any) -> None:
    for i in range(2):
        await broker.publish(completed(f"{group}-{i}", group, reward=float(i), **more))


async def test_a_used_up_budget_stops_a_new_process_too_and_a_higher_one_goes_on(
    broker: Broker, nats_config: NatsConfig
) -> None:
    async with judging(broker, settings(nats_config)):
        await play(broker, "before")
        await groups(broker, 1)
    await tell(broker, "raised")
    async with judging(broker, settings(nats_config)):
        await play(broker, "void", outcome="no_result")  # nothing to score for any judge
        await groups(broker, 1, "discarded")
        await play(broker, "over")
        void, over = await groups(broker, 2, "discarded")
    await tell(broker, "cleared")
    async with judging(broker, settings(nats_config)):
        await play(broker, "after")
        assert [g.group for g in await groups(broker, 2)] == ["before", "after"]
    for done in ((3, 0, 1, 0), (0, 3, 0, 0)):
        report = await Rejudge(broker, settings(nats_config), None, branch="b").run()
        assert (report.rejudged, report.skipped, report.rescued, report.failed) == done
    (rescued,) = [g for g in await groups(broker, 5) if (g.group, g.branch) == ("over", "b")]
    assert (rescued.closed_by, rescued.offline, rescued.origin[:5]) == ("replay", True, "main/")
    assert {m.trajectory: m.reward for m in rescued.members} == {"over-0": 0.0, "over-1": 1.0}
    assert (void.group, void.reason) == ("void", "too_small")
    assert (over.group, over.reason, over.by, over.detail) == ("over", "over_budget", "judge", DETAIL)
    assert over.trajectories == ("over-0", "over-1")


async def test_an_alarm_of_a_limit_that_is_not_set_stops_nothing(broker: Broker, nats_config: NatsConfig) -> None:
    await tell(broker, "raised")
    await tell(broker, "raised", "no_variance")
    async with judging(broker, settings(nats_config, judge_usd=0.0, gpu_hours=1.0)):
        await play(broker, "g")
        await groups(broker, 1)


async def test_a_share_is_kept_by_the_groups_names(broker: Broker, nats_config: NatsConfig) -> None:
    names = [f"g{i}" for i in range(12)]
    kept = {name for name in names if split_point(name) < 50}
    assert 0 < len(kept) < len(names)
    await tell(broker, "raised")
    async with judging(broker, settings(nats_config, keep_share=0.5)):
        for name in names:
            await play(broker, name)
        assert {g.group for g in await groups(broker, len(kept))} == kept
        await groups(broker, len(names) - len(kept), "discarded")


async def test_the_groups_of_a_requested_batch_come_without_rewards(broker: Broker, nats_config: NatsConfig) -> None:
    """The trainer waits for each of them, and discards them."""
    await tell(broker, "raised")
    async with judging(broker, settings(nats_config)):
        await play(broker, "g", batch=TrainingBatch(id="b", groups=("g",)))
        (found,) = await groups(broker, 1)
    assert [m.outcome for m in found.members] == ["masked", "masked"]
