"""Trajectories of one replica: lists that let other tasks run, and calls recorded through power cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import nats.errors
import pytest

from pipeline.config import NatsConfig
from pipeline.events import Event, ExchangeRecorded, TrajectoryOpened, now_us
from pipeline.log.broker import Broker
from pipeline.log.fast_client import Ack
from pipeline.names import new_id
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import NOT_RECORDED, Completion, Registry
from rollout_gateway.http.errors import ApiError
from tests.conftest import NatsServer
from tests.kits.power import Power
from tests.rollout_gateway.kit import StubCall

pytestmark = pytest.mark.anyio

TOKENS = TrajectoryTokens(b"0" * 32, "test")


def test_a_trajectory_key_is_known_by_its_signature() -> None:
    for name in ("t", "a/b", "ä.%", "x" * 200, new_id("t")):
        key = TOKENS.issue(name)
        assert TOKENS.verify(key) == name
        prefix, _, mac = key.rpartition(".")
        for other in (
            prefix, f"{prefix}.", f"{prefix}.{mac[:-1]}", f"{prefix}.{mac}A", f"{prefix}=.{mac}", key.upper(),
            f"{prefix}.{mac[::-1]}",
            TrajectoryTokens(b"1" * 32, "test").issue(name), TrajectoryTokens(b"0" * 32, "other").issue(name),
        ):  # fmt: skip
            assert TOKENS.verify(other) is None, other
    for other in ("", "jwr-", "jwr-.", "jwr-!!.x", "jwr-" + "A" * 5, "none", "jwr-\xff.ü"):
        assert TOKENS.verify(other) is None


def made(name: str, by: str, choices: int = 1) -> StubCall:
    """One call, for `Trajectory.record`."""

    def make(seq: int) -> list[ExchangeRecorded]:
        return [
            ExchangeRecorded(
                project="test", trajectory=name, seq=seq, choice=choice, model="m", policy_version="m@0",
                step=0, request=b"{}",
                response=b"{}", prompt_ids=b"", sampled_ids=b"", logprobs=b"", request_hash=f"{by}{seq}", replica=by,
            )
            for choice in range(choices)
        ]  # fmt: skip

    return StubCall(make)


async def on_the_log(broker: Broker, name: str = "t") -> list[tuple[int, int, str]]:
    events = [r.event for r in await broker.read(ExchangeRecorded, project="test", trajectory=name)]
    return [(e.seq, e.choice, e.replica) for e in events if isinstance(e, ExchangeRecorded)]


OPENED = TrajectoryOpened(project="test", trajectory="t", model="m", group="g", at=now_us())


@pytest.mark.parametrize(("others", "choices"), [(0, 1), (1, 2), (3, 2), (5, 2), (5, 1)])
async def test_a_run_goes_on_after_the_log_lost_its_last_calls(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path, others: int, choices: int
) -> None:
    """This replica lives through the power cut; another one may have gone on with the run before it asks again."""
    power = Power(nats_server, tmp_path)
    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TOKENS)
        found = await registry.open(OPENED, "")
        await found.record(made("t", "kept"))
    await power.synced()
    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TOKENS)
        found = await registry.find("t")
        for _ in range(3):
            await found.record(made("t", "lost", 2))
        assert (found.recorded.exchanges, found.recorded.next_seq) == (7, 4)
        await power.cut()
        async with Broker.connect(nats_config) as beside:
            other = Registry(beside, "test", TOKENS)
            for _ in range(others):
                await (await other.find("t")).record(made("t", "other", choices))
        with anyio.fail_after(30):
            while not broker.client.stats["reconnects"]:
                await anyio.sleep(0.01)
            assert await found.record(made("t", "new", 2)) == others + 1
        expected = [(0, 0, "kept")]
        expected += [(1 + i, choice, "other") for i in range(others) for choice in range(choices)]
        expected += [(1 + others, choice, "new") for choice in range(2)]
        assert await on_the_log(broker) == expected
        ended = await registry.complete("t", Completion(reward=1.0))
        # Calls that were answered are not on the log: the run never becomes a reward.
        assert (ended.exchanges, ended.outcome) == (len(expected), "no_result")
        assert ended.metrics == {NOT_RECORDED: float(max(6 - others * choices, 1))}


async def test_a_call_that_is_recorded_while_the_power_is_cut(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    """It was given its number before the loss can be known: it is recorded once, behind a gap."""
    power = Power(nats_server, tmp_path)
    async with Broker.connect(nats_config) as broker:
        await Registry(broker, "test", TOKENS).open(OPENED, "")
    await power.synced()
    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TOKENS)
        found = await registry.find("t")
        for _ in range(2):
            await found.record(made("t", "lost"))
        publish = broker.publish

        async def cut_first(event: Event, *args: Any, **options: Any) -> Ack:
            broker.publish = publish  # type: ignore[method-assign]
            await power.cut()
            return await publish(event, *args, **options)

        broker.publish = cut_first  # type: ignore[method-assign]
        with anyio.fail_after(30):
            assert await found.record(made("t", "new")) == 2
            assert await found.record(made("t", "new")) == 3
        assert await on_the_log(broker) == [(2, 0, "new"), (3, 0, "new")]
        ended = await registry.complete("t", Completion(reward=1.0))
        assert (ended.exchanges, ended.outcome) == (2, "no_result")


async def test_a_power_cut_between_two_choices_of_a_call(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    """The first choice is lost, and another replica takes the number before the second one is written."""
    power = Power(nats_server, tmp_path)
    async with Broker.connect(nats_config) as broker:
        await Registry(broker, "test", TOKENS).open(OPENED, "")
    await power.synced()
    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TOKENS)
        found = await registry.find("t")
        publish, calls = broker.publish, 0

        async def cut_before_second(event: Event, *args: Any, **options: Any) -> Ack:
            nonlocal calls
            calls += 1
            if calls == 2:
                await power.cut()
                async with Broker.connect(nats_config) as beside:
                    other = Registry(beside, "test", TOKENS)
                    await (await other.find("t")).record(made("t", "other", 2))
            return await publish(event, *args, **options)

        broker.publish = cut_before_second  # type: ignore[method-assign]
        with anyio.fail_after(30):
            assert await found.record(made("t", "new", 2)) == 1
        assert await on_the_log(broker) == [(0, 0, "other"), (0, 1, "other"), (1, 0, "new"), (1, 1, "new")]


async def test_a_run_whose_opening_was_lost_is_opened_again(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    power = Power(nats_server, tmp_path)
    async with Broker.connect(nats_config):
        pass
    await power.synced()
    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TOKENS)
        names = ("silent", "called", "taken")
        runs = [await registry.open(msgspec.structs.replace(OPENED, trajectory=name), "") for name in names]
        await runs[1].record(made("called", "lost"))
        await power.cut()
        async with Broker.connect(nats_config) as beside:
            theirs = msgspec.structs.replace(OPENED, trajectory="taken", group="another")
            await Registry(beside, "test", TOKENS).open(theirs, "")
        for run in runs[:2]:
            assert await run.record(made(run.id, "new")) == 0
            assert await on_the_log(broker, run.id) == [(0, 0, "new")]
            found = await Registry(broker, "test", TOKENS).find(run.id)
            assert found.opened == run.opened
        with pytest.raises(ApiError, match="opened before with other settings"):
            await runs[2].record(made("taken", "new"))
        assert await on_the_log(broker, "taken") == []
        assert (await registry.complete("silent", Completion())).outcome == "scored"
        assert (await registry.complete("called", Completion())).outcome == "no_result"


async def test_a_server_that_comes_back_with_all_of_its_log_changes_nothing(
    nats_server: NatsServer, nats_config: NatsConfig
) -> None:
    async with Broker.connect(nats_config) as broker:
        registry = Registry(broker, "test", TOKENS)
        found = await registry.open(OPENED, "")
        await found.record(made("t", "a", 2))
        silent = await registry.open(msgspec.structs.replace(OPENED, trajectory="silent"), "")
        await broker.js.publish("rollout.exchange.test.t", b"\xc1")
        assert not await found.refresh()
        nats_server.kill()
        await anyio.to_thread.run_sync(nats_server.start)
        assert await found.record(made("t", "a")) == 1
        assert await silent.record(made("silent", "a")) == 0
        assert (found.rebuilt, silent.rebuilt) == (0, 0)
        assert (await registry.complete("t", Completion())).outcome == "scored"


async def test_a_call_whose_acknowledgement_was_lost_is_recorded_once_though_another_replica_went_on(
    nats_config: NatsConfig,
) -> None:
    """The server knows no message id of it: the payload tells that the repeated publish is the same call."""
    async with Broker.connect(nats_config) as broker, Broker.connect(nats_config) as beside:
        found = await Registry(broker, "test", TOKENS).open(OPENED, "")
        other = await Registry(beside, "test", TOKENS).find("t")
        publish = broker.client.publish_acked

        async def lose_first(*args: Any) -> Ack:
            broker.client.publish_acked = publish  # type: ignore[method-assign]
            await publish(*args)
            assert await other.record(made("t", "other")) == 1
            raise nats.errors.TimeoutError

        broker.client.publish_acked = lose_first  # type: ignore[method-assign, assignment]
        with anyio.fail_after(30):
            assert await found.record(made("t", "a")) == 0
            assert await found.record(made("t", "a")) == 2
        assert await on_the_log(broker) == [(0, 0, "a"), (1, 0, "other"), (2, 0, "a")]
        assert (await Registry(broker, "test", TOKENS).complete("t", Completion())).outcome == "scored"
