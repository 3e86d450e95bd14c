"""An expired trajectory is refused, and no other one takes what is left of it."""

import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.names import new_dated_id
from rollout_gateway.capture.registry import Completion
from rollout_gateway.http.errors import ApiError
from tests.kits.events import exchange, opened
from tests.kits.waiting import until
from tests.rollout_gateway.kit import registry_of

OLD = "t-20200101T000000Z-" + "0" * 20


async def test_an_expired_trajectory_is_refused_by_every_gateway(nats_config: NatsConfig) -> None:
    """A dated id for ever, another one until the log has forgotten the trajectory."""
    short = msgspec.structs.replace(nats_config, rollouts_max_age_h=4 / 3600)
    dated = new_dated_id("t")
    names = ["mine", dated]
    async with Broker.connect(short) as broker, Broker.connect(short) as second:
        here, there = registry_of(broker), registry_of(second)
        found = [await here.open(opened(name), "") for name in names]
        found[0].begin()
        found[0].end()
        assert await there.open(opened("mine"), "") is not found[0]  # a retry at another gateway

        async def is_empty() -> bool:
            return not (await broker.stream_info("ROLLOUTS")).state.messages

        await until(is_empty)
        for name, trajectory in zip(names, found, strict=True):
            with pytest.raises(ApiError) as refused:
                trajectory.begin()
            assert (refused.value.status, refused.value.code) == (410, "trajectory_expired")
            with pytest.raises(ApiError, match="expired"):
                await here.complete(name, Completion(reward=1.0))
        for registry in (here, there, registry_of(broker)):
            with pytest.raises(ApiError, match="expired"):
                await registry.open(opened(dated), "")
        assert (await broker.stream_info("ROLLOUTS")).state.messages == 0
        again = await here.open(opened("mine"), "")
        assert again is not found[0]
        again.begin()


@pytest.mark.parametrize("completed", [False, True])
async def test_an_id_is_not_used_again_while_the_log_holds_a_part_of_its_trajectory(
    broker: Broker, completed: bool
) -> None:
    registry = registry_of(broker)
    found = await registry.open(opened("mine"), "")
    if completed:
        await registry.complete("mine", Completion(reward=1.0))
    else:
        await found.record([exchange("mine")])
    opening = await registry.log.opening("mine")
    assert opening is not None
    await broker.js.delete_msg("ROLLOUTS", opening.seq)  # as its age does, before that of what came later
    with pytest.raises(ApiError, match="expired"):
        await registry_of(broker).open(opened("mine"), "")


async def test_an_id_with_an_old_date_is_refused(broker: Broker) -> None:
    registry = registry_of(broker)
    for call in (registry.find(OLD), registry.open(opened(OLD), ""), registry.complete(OLD, Completion())):
        with pytest.raises(ApiError, match="opened more than 48 hours ago"):
            await call


async def test_an_id_with_a_date_to_come_is_not_used_twice(broker: Broker) -> None:
    future = "t-20990101T000000Z-" + "0" * 20
    await broker.publish(exchange(future))  # what the log still holds of a run whose opening has expired
    with pytest.raises(ApiError, match="expired"):
        await registry_of(broker).open(opened(future), "")
