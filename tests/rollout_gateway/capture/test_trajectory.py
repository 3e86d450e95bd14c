"""Trajectories of one replica: keys, and calls recorded while servers and gateways come and go."""

from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
import nats.errors
import pytest

from pipeline.config import NatsConfig
from pipeline.errors import LogShrankError
from pipeline.events import ExchangeRecorded, now_us
from pipeline.log import stream_reader
from pipeline.log.broker import Broker
from pipeline.log.fast_client import Ack
from pipeline.names import new_id
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import Completion
from tests.conftest import NatsServer
from tests.kits.events import exchange, opened
from tests.kits.power import Power
from tests.kits.waiting import until_true
from tests.rollout_gateway.kit import TOKENS, registry_of


def test_a_trajectory_key_is_known_by_its_signature() -> None:
    for name in ("t", "a/b", "ä.%", "x" * 200, new_id("t")):
        key = TOKENS.issue(name)
        assert TOKENS.verify(key) == name
        prefix, _, mac = key.rpartition(".")
        for other in (
            prefix,
            f"{prefix}.",
            f"{prefix}.{mac[:-1]}",
            f"{prefix}.{mac}A",
            f"{prefix}=.{mac}",
            key.upper(),
            f"{prefix}.{mac[::-1]}",
            TrajectoryTokens(b"1" * 32, "p").issue(name),
            TrajectoryTokens(b"0" * 32, "other").issue(name),
        ):
            assert TOKENS.verify(other) is None, other
    for other in ("", "jwr-", "jwr-.", "jwr-!!.x", "jwr-" + "A" * 5, "none", "jwr-\xff.ü"):
        assert TOKENS.verify(other) is None


def call(run: str, by: str, choices: int = 1) -> list[ExchangeRecorded]:
    """A call for `Trajectory.record`. `by`: whose it is."""
    return [exchange(run, choice=choice, replica=by) for choice in range(choices)]


async def on_the_log(broker: Broker) -> list[tuple[int, int, str]]:
    events = [r.event for r in await broker.read(ExchangeRecorded, project="p", trajectory="t")]
    return [(e.seq, e.choice, e.replica) for e in events]


async def test_a_log_that_lost_its_end_ends_the_gateway(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is recorded on what is gone; the next start reads what the log still holds."""
    monkeypatch.setattr(stream_reader, "_CATCH_UP_S", 0.1)  # there is no other server that could be behind
    power = Power(nats_server, tmp_path)
    async with Broker.connect(nats_config) as broker:
        run = await registry_of(broker).open(opened("t"), "")
        await run.record(call("t", "kept"))
    await power.synced()
    async with Broker.connect(nats_config) as broker, Broker.connect(nats_config) as beside:
        registry, reader = registry_of(broker), registry_of(beside)
        run = await registry.find("t")
        await run.record(call("t", "lost"))
        read = await reader.find("t")
        await registry.open(opened("lost"), "")
        await power.cut()
        async with Broker.connect(nats_config) as third:  # the log's numbers are given again
            other = await registry_of(third).open(opened("other"), "")
            await other.record(call("other", "other", 3))
        for gateway, known in ((registry, run), (reader, read)):
            await until_true(lambda g=gateway: g.log.broker.client.stats["reconnects"])
            with pytest.raises(LogShrankError, match="lost its end"):
                await known.record(call("t", "new", 2))
            with pytest.raises(LogShrankError, match="lost its end"):
                await gateway.complete("t", Completion(reward=1.0))
            with anyio.fail_after(60), pytest.raises(LogShrankError, match="reads it anew at its next start"):
                await gateway.log.watch_log_end()
        async with Broker.connect(nats_config) as again:
            ended = await registry_of(again).complete("t", Completion(reward=1.0))
        assert (ended.exchanges, ended.outcome) == (1, "scored")
        assert await on_the_log(beside) == [(0, 0, "kept")]


async def test_a_server_that_comes_back_with_all_of_its_log_changes_nothing(
    nats_server: NatsServer, broker: Broker
) -> None:
    registry = registry_of(broker)
    found = await registry.open(opened("t"), "")
    await found.record(call("t", "a", 2))
    silent = await registry.open(opened("silent"), "")
    await broker.js.publish("rollout.exchange.p.t", b"\xc1")
    await found.refresh()
    assert found.recorded.exchanges == 2
    nats_server.kill()
    await anyio.to_thread.run_sync(nats_server.start)
    assert await found.record(call("t", "a")) == 1
    assert await silent.record(call("silent", "a")) == 0
    assert (await registry.complete("t", Completion())).outcome == "scored"


async def test_a_new_leader_that_has_yet_to_apply_the_log_lost_nothing(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = registry_of(broker)
    found = await registry.open(opened("t"), "")
    await found.record(call("t", "a"))
    monkeypatch.setattr(stream_reader, "_CATCH_UP_S", 0.1)
    get, info = broker.leader_get, broker.stream_info
    answers = ["of before", "of now"]

    async def leader_get(*args: Any) -> Any:
        return None if answers.pop(0) == "of before" else await get(*args)

    async def stream_info(*args: Any) -> Any:
        found = await info(*args)
        found.state.last_seq = 1
        return found

    monkeypatch.setattr(broker, "leader_get", leader_get)
    monkeypatch.setattr(broker, "stream_info", stream_info)
    broker.client.stats["reconnects"] += 1
    await registry.log.check_end()
    assert not answers


async def test_what_is_read_after_a_reconnection_does_not_replace_what_has_to_be_checked(
    broker: Broker, nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that lost its end and grew past it would otherwise not be noticed."""
    registry = registry_of(broker)
    found = await registry.open(opened("t"), "")
    await found.record(call("t", "a"))
    known = found.recorded.last_stream_seq
    async with Broker.connect(nats_config) as beside:
        await (await registry_of(beside).find("t")).record(call("t", "other"))
    broker.client.stats["reconnects"] += 1
    await found.refresh()
    get, asked = broker.leader_get, []

    async def leader_get(stream: str, request: dict[str, Any]) -> Any:
        asked.append(request)
        return await get(stream, request)

    monkeypatch.setattr(broker, "leader_get", leader_get)
    await registry.log.check_end()
    assert asked == [{"seq": known}]


async def test_an_event_that_another_replica_published_first_is_no_lost_end(
    broker: Broker, nats_config: NatsConfig
) -> None:
    """Regression: the log holds the other one's event, with another time. After the next reconnection the gateway took
    its own for lost, and ended."""
    registry = registry_of(broker)
    first, again = opened("t"), msgspec.structs.replace(opened("t"), at=now_us() + 5)
    async with Broker.connect(nats_config) as beside:
        await registry_of(beside).log.publish(first, {})
    await registry.log.publish(again, {})
    broker.client.stats["reconnects"] += 1
    await registry.log.check_end()


async def test_a_call_whose_acknowledgement_was_lost_is_recorded_once_though_another_replica_went_on(
    nats_config: NatsConfig,
) -> None:
    """The server knows no message id of it: the payload tells that the repeated publish is the same call."""
    async with Broker.connect(nats_config) as broker, Broker.connect(nats_config) as beside:
        found = await registry_of(broker).open(opened("t"), "")
        other = await registry_of(beside).find("t")
        publish = broker.client.publish_acked

        async def lose_first(*args: Any) -> Ack:
            broker.client.publish_acked = publish  # type: ignore[method-assign]
            await publish(*args)
            assert await other.record(call("t", "other")) == 1
            raise nats.errors.TimeoutError

        broker.client.publish_acked = lose_first  # type: ignore[method-assign, assignment]
        with anyio.fail_after(60):
            assert await found.record(call("t", "a")) == 0
            assert await found.record(call("t", "a")) == 2
        assert await on_the_log(broker) == [(0, 0, "a"), (1, 0, "other"), (2, 0, "a")]
        assert (await registry_of(broker).complete("t", Completion())).outcome == "scored"
