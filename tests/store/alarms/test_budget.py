"""A budget from the verdicts that use it up to the groups that are not scored, over restarts of both services."""

import msgspec

from pipeline.commands.status import read_log
from pipeline.config import AlarmsConfig, BudgetConfig, JudgeConfig, NatsConfig, SigningConfig
from pipeline.events import GroupDiscarded, GroupScored
from pipeline.log.broker import Broker
from pipeline.security.signing import Trust
from tests.judge.kit import completed, groups, judging
from tests.store.alarms.kit import changes
from tests.store.kit import StoreProcess, publish, scored, verdict

OFTEN = AlarmsConfig(every_s=0.1)
FIVE, TEN = BudgetConfig(judge_usd=5.0), BudgetConfig(judge_usd=10.0)


def dear(name: str, usd: float) -> GroupScored:
    return scored(name, {}, verdicts=(verdict(cost_usd=usd),))


async def test_what_was_spent_survives_restarts_and_counts_once(
    broker: Broker, nats_config: NatsConfig, running_store: StoreProcess
) -> None:
    await publish(broker, [dear("a", 3.0)])
    async with running_store(OFTEN, budget=FIVE):
        pass
    await publish(broker, [dear("a", 3.0), dear("b", 2.5)])  # the first one a second time
    async with running_store(OFTEN, budget=FIVE) as config:
        (raised,) = await changes(broker, 1)
    assert (raised.alarm, raised.value, raised.threshold) == ("over_judge_budget", 5.5, 5.0)
    async with running_store(OFTEN, budget=FIVE):
        settings = msgspec.structs.replace(config, project="p", judge=JudgeConfig(group_size=2))
        async with judging(broker, settings):
            for i in range(2):
                await broker.publish(completed(f"t{i}", "g", reward=float(i)))
            (discarded,) = await groups(broker, 1, "discarded")
    assert isinstance(discarded, GroupDiscarded)
    assert (discarded.reason, discarded.detail) == ("over_budget", "5.5 of 5 USD are spent (budget.judge_usd)")
    (shown,) = (await read_log(nats_config, Trust(SigningConfig()), "p"))["raised"]
    assert "(budget.judge_usd)" in shown["detail"]
    assert "Set a higher `budget.judge_usd`" in shown["action"]
    async with running_store(OFTEN, budget=TEN):
        _, cleared = await changes(broker, 2)
    assert cleared.state == "cleared"
    async with judging(broker, msgspec.structs.replace(settings, budget=TEN)):
        for i in range(2):
            await broker.publish(completed(f"u{i}", "h", reward=float(i)))
        assert [g.group for g in await groups(broker, 3)] == ["a", "b", "h"]
