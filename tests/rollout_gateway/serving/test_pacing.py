"""Groups ahead of the trainer are counted over all gateway processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.events import GroupAdmitted, GroupDiscarded
from pipeline.log.broker import Broker
from rollout_gateway.http.errors import ApiError
from rollout_gateway.serving.pacing import Pacing
from tests.kits.waiting import until, until_true


@asynccontextmanager
async def gateways(nats: NatsConfig, count: int, *, limit: int, forget_s: float = 600) -> AsyncIterator[list[Pacing]]:
    """So many gateways' pacing, each with a connection of its own, and following."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            broker = await stack.enter_async_context(Broker.connect(nats))
            pacing = Pacing("p", broker, ["m"], limit=limit, forget_s=forget_s)
            await pacing.rebuild()
            found.append(pacing)
        tg = await stack.enter_async_context(anyio.create_task_group())
        for pacing in found:
            tg.start_soon(pacing.follow)
        yield found
        tg.cancel_scope.cancel()


async def test_a_refusal_tells_a_key_of_its_own_groups_only(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 1, limit=12) as (pacing,):
        for number in range(12):
            assert await admitted(pacing, f"g{number}")
        for number in range(6):
            await pacing.admit("m", f"b{number}", "train", "bob")
        with pytest.raises(ApiError) as refused:
            await pacing.admit("m", "b6", "train", "bob")
        assert "6 groups of m" in refused.value.message
        assert not {"12", "18"} & set(refused.value.message.split())


async def admitted(pacing: Pacing, group: str, split: str = "train") -> bool:
    try:
        await pacing.admit("m", group, split, "alice")
    except ApiError as error:
        if error.code != "groups_ahead":
            raise
        return False
    return True


def discard(group: str) -> Any:
    return GroupDiscarded(project="p", model="m", group=group, trajectories=("t",), reason="stale", by="trainer")


async def test_gateways_that_admit_at_once_stay_within_the_limit_together(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 3, limit=7) as three:
        asked = [admitted(pacing, f"g{number}") for number in range(12) for pacing in three]
        let_in = await asyncio.gather(*asked)
        by_group = {f"g{n}": set(let_in[3 * n : 3 * n + 3]) for n in range(12)}
        passed = {group for group, answers in by_group.items() if True in answers}
        assert len(passed) == 7
        for pacing in three:  # an admitted group passes at every gateway, and nobody else does
            assert {g for g in by_group if await admitted(pacing, g)} == passed
            assert await admitted(pacing, "other", "val")


async def test_a_group_that_is_done_makes_room_at_every_gateway(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 2, limit=2) as (a, b), Broker.connect(nats_config) as broker:
        assert await admitted(a, "one")
        assert await admitted(b, "two")
        assert not await admitted(a, "three")
        assert not await admitted(b, "three")
        await broker.publish(discard("one"))
        await until(lambda: admitted(b, "three"))
        assert not await admitted(a, "four")
        a.mark_done("m", ("two",), (await broker.read(GroupAdmitted, project="p", model="m"))[-1].place.at + 1)
        assert await admitted(a, "four")
        assert not await admitted(b, "five")


async def test_a_run_that_came_late_does_not_end_its_group(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 1, limit=1) as (before,), Broker.connect(nats_config) as broker:
        assert await admitted(before, "one")
        for change in ({"reason": "late"}, {"split": "val"}, {"branch": "other"}):
            await broker.publish(msgspec.structs.replace(discard("one"), **change))
        async with gateways(nats_config, 1, limit=1) as (after,):
            assert not await admitted(after, "two")
        await broker.publish(discard("none"))
        await until_true(lambda: before._next_seq > 4)
        assert not await admitted(before, "two")


async def test_a_gateway_that_starts_counts_what_others_admitted_before(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 1, limit=2) as (before,), Broker.connect(nats_config) as broker:
        for group in ("one", "two"):
            assert await admitted(before, group)
        await broker.publish(discard("one"))
        async with gateways(nats_config, 1, limit=2) as (after,):
            assert await admitted(after, "two")
            assert await admitted(after, "three")
            assert not await admitted(after, "four")
            assert await admitted(after, "three")  # a further run of an admitted group


async def test_a_group_whose_agents_died_does_not_count_for_ever(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 2, limit=1, forget_s=1) as (a, b):
        assert await admitted(a, "dead")
        await until(lambda: admitted(b, "next"))
        assert await admitted(a, "next")


async def test_a_group_may_begin_again_after_it_was_trained(nats_config: NatsConfig) -> None:
    async with gateways(nats_config, 2, limit=1) as (a, b), Broker.connect(nats_config) as broker:
        assert await admitted(a, "one")
        (first,) = await broker.read(GroupAdmitted, project="p", model="m")
        for pacing in (a, b):
            pacing.mark_done("m", ("one",), first.place.at + 1)
        assert await admitted(b, "one")
        assert not await admitted(a, "two")
