"""`gateway.capture = "off"`: what of a run remains; and completions by other replicas."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, PolicyPromoted, TrajectoryOpened
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import Completion, Registry
from tests.rollout_gateway.conftest import PROJECT, publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm, parts

pytestmark = pytest.mark.anyio


async def recorded(broker: Broker, trajectory: str) -> list[ExchangeRecorded]:
    history = await broker.read(ExchangeRecorded, project=PROJECT, trajectory=trajectory)
    return [r.event for r in history]


async def test_without_capture_pins_and_sides_of_a_split_hold(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    server, second = FakeVllm(), FakeVllm()
    async with parts(nats_config, tmp_path, [server, second], capture="off") as gateway:
        for step in (1, 2):
            await publish_adapter(gateway.broker, step)
        await gateway.until(lambda: gateway.router.current("tictactoe") == "tictactoe@2")
        opening = TrajectoryOpened(
            project=PROJECT, trajectory="pinned", model="tictactoe", group="g", pinned="tictactoe@1"
        )
        await gateway.registry.open(opening, "")
        for _ in range(3):
            await gateway.call("pinned")
        assert server.calls + second.calls == ["tictactoe@1"] * 3
        assert [] in (server.calls, second.calls), "a run left the server that holds its prefix"

        await gateway.broker.publish(
            PolicyPromoted(
                project=PROJECT, model="tictactoe", version="tictactoe@1", action="split", other="tictactoe@2",
                percent=50.0, request="r",
            )
        )  # fmt: skip
        model = gateway.policies.models["tictactoe"]
        await gateway.until(lambda: model.promoted is not None)
        sides = set()
        for number in range(12):
            await gateway.open(f"t{number}")
            server.calls.clear()
            second.calls.clear()
            for _ in range(3):
                await gateway.call(f"t{number}")
            (side,) = set(server.calls + second.calls)
            assert side == gateway.router.current("tictactoe", f"t{number}")
            sides.add(side)
        assert sides == {"tictactoe@1", "tictactoe@2"}
        assert await recorded(gateway.broker, "pinned") == []
        ended = await gateway.registry.complete("pinned", Completion(reward=1.0))
        assert ended.exchanges == 0


async def test_a_completion_elsewhere_is_heeded_though_it_came_while_this_replica_was_away(
    nats_config: NatsConfig,
) -> None:
    async with Broker.connect(nats_config) as one, Broker.connect(nats_config) as two:
        here, there = (Registry(b, PROJECT, TrajectoryTokens(b"s" * 32, PROJECT)) for b in (one, two))
        await here.mark_position()
        await there.open(TrajectoryOpened(project=PROJECT, trajectory="t", model="m", group="g"), "")
        found = await here.find("t")
        await there.complete("t", Completion(reward=1.0))
        assert here.get("t") is found, "nothing was followed yet"
        async with anyio.create_task_group() as tg:
            tg.start_soon(here.follow_completions)
            with anyio.fail_after(20):
                while here.get("t") is not None:
                    await anyio.sleep(0.01)
            tg.cancel_scope.cancel()
        assert found.completing
