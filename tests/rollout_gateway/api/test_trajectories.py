"""Lists of trajectories: paged, filtered, and without blocking other tasks."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from pipeline.config import GatewayConfig
from pipeline.events import TrajectoryOpened
from rollout_gateway.access.api_keys import FULL_ACCESS, Access
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.api.trajectories import TrajectoryRoutes
from rollout_gateway.capture.registry import Registry
from rollout_gateway.capture.trajectory import Trajectory

pytestmark = pytest.mark.anyio

TOKENS = TrajectoryTokens(b"0" * 32, "test")


async def test_a_list_is_paged_filtered_and_gives_way() -> None:
    registry = Registry(cast(Any, None), "test", TOKENS, keep=10_000)
    for number in range(3000):
        event = TrajectoryOpened(
            project="test", trajectory=f"t{number}", model="m", group=f"g{number % 2}", at=number,
            owner="bob" if number % 3 else "alice",
            metadata=b'{"k": "%b"}' % (b"x" * (400_000 if number > 2995 else 1)),
        )  # fmt: skip
        registry._remember(Trajectory(registry.log, event))
    nothing = cast(Any, None)
    routes = TrajectoryRoutes("test", GatewayConfig(), nothing, registry, nothing, nothing, nothing)
    turns, done = 0, False

    async def others() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(others())
    first = await routes.page({"limit": "2"}, FULL_ACCESS)
    done = True
    await beside
    assert turns >= 3
    assert ([t.id for t in first.data], first.has_more) == (["t2999", "t2998"], True)
    large = await routes.page({}, FULL_ACCESS)
    assert ([t.id for t in large.data], large.has_more) == (["t2999", "t2998", "t2997"], True)

    alice, seen, query = Access("alice"), [], {"group": "g1", "limit": "300"}
    while True:
        page = await routes.page(query, alice)
        seen += [t.id for t in page.data]
        if not page.has_more:
            break
        query["after"] = seen[-1]
    assert seen == [f"t{n}" for n in reversed(range(3000)) if n % 2 and not n % 3]
    for query in (
        {"after": "none"},
        {"after": "t1"},
        {"limit": "٣"},
        {"limit": "9" * 5000},
        {"limit": "0" * 4999 + "1"},
        {"limit": "00001" + "0" * 5000},
    ):  # t1 is bob's
        with pytest.raises(Exception, match=r"after|limit"):
            await routes.page(query, alice)
