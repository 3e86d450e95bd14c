"""`gateway.capture = "async"` and `"off"`: which guarantees of a run remain, and completions by other replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from pipeline.config import NatsConfig
from pipeline.events import ExchangeRecorded, PolicyPromoted, TrajectoryOpened
from pipeline.log.broker import Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.exchange import Caller
from rollout_gateway.capture.registry import NOT_RECORDED, Completion, Registry
from rollout_gateway.dialects.endpoints import CHAT
from tests.conftest import NatsServer
from tests.rollout_gateway.conftest import PROJECT, publish_adapter
from tests.rollout_gateway.fake_vllm import FakeVllm, GatewayParts, parts

pytestmark = pytest.mark.anyio


async def recorded(broker: Broker, trajectory: str) -> list[ExchangeRecorded]:
    history = await broker.read(ExchangeRecorded, project=PROJECT, trajectory=trajectory)
    return [r.event for r in history]


async def call_again(gateway: GatewayParts, trajectory: str) -> tuple[int, Any]:
    """The same call by a client that says that it tried before."""
    call = CHAT.read(msgspec.json.encode({"model": "tictactoe", "messages": []}))
    status, answer = await gateway.chat.plain(
        CHAT, call, Caller(await gateway.registry.find(trajectory), is_retry=True)
    )
    return status, msgspec.json.decode(answer)


async def test_a_completion_counts_what_is_still_being_recorded(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    server = FakeVllm()
    async with parts(nats_config, tmp_path, [server], capture="async") as gateway:
        await gateway.open("t")
        await gateway.call("t")
        nats_server.kill()
        for _ in range(2):
            assert (await gateway.call("t"))[0] == 200  # answered, though there is no log
        ended = []

        async def complete() -> None:
            ended.append(await gateway.registry.complete("t", Completion(reward=1.0)))

        async with anyio.create_task_group() as tg:
            tg.start_soon(complete)
            await anyio.to_thread.run_sync(nats_server.start)
        assert (ended[0].exchanges, ended[0].outcome) == (3, "scored")
        assert [e.seq for e in await recorded(gateway.broker, "t")] == [0, 1, 2]


async def test_a_repeated_call_waits_for_the_record_of_the_first(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    server = FakeVllm()
    async with parts(nats_config, tmp_path, [server], capture="async") as gateway:
        await gateway.open("t")
        nats_server.kill()
        first = await gateway.call("t")
        again = []

        async def repeat() -> None:
            again.append(await call_again(gateway, "t"))

        async with anyio.create_task_group() as tg:
            tg.start_soon(repeat)
            await anyio.to_thread.run_sync(nats_server.start)
        assert again[0][0] == first[0] == 200
        assert len(server.calls) == 1, "the same call was sampled twice"


async def test_a_run_with_a_call_that_the_log_did_not_take_never_becomes_a_reward(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    hurried = msgspec.structs.replace(nats_config, publish_deadline_s=0.5, ack_timeout_s=0.2)
    async with parts(hurried, tmp_path, [FakeVllm()], capture="async") as gateway:
        await gateway.open("t")
        nats_server.kill()
        await gateway.call("t")
        found = await gateway.registry.find("t")
        with anyio.fail_after(30):
            await found.idle.wait()
        assert (found.not_recorded, gateway.registry.log.not_recorded) == (1, 1)
        await anyio.to_thread.run_sync(nats_server.start)
        with anyio.fail_after(30):
            while not gateway.broker.client.is_connected:
                await anyio.sleep(0.02)
        assert (await gateway.call("t"))[0] == 200
        body = Completion(reward=1.0, metrics={"turns": 2.0})
        ended = await gateway.registry.complete("t", body)
        # What waited for the connection may still have arrived, too late to be sure of.
        assert (ended.outcome, ended.exchanges) == ("no_result", len(await recorded(gateway.broker, "t")))
        assert ended.metrics == {"turns": 2.0, NOT_RECORDED: 1.0}
        # The client's retry, also at a replica that knows nothing of it, is answered alike.
        other = Registry(gateway.broker, PROJECT, TrajectoryTokens(b"s" * 32, PROJECT))
        for registry in (gateway.registry, other):
            assert await registry.complete("t", body) == ended


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
