"""Log to Parquet against a real NATS server: nothing lost, nothing twice."""

import dataclasses
import itertools
from pathlib import Path

import anyio
import pytest

from pipeline import streams
from pipeline.commands import dead_letters as dead
from pipeline.config import NatsConfig
from pipeline.events import AnyEvent, DeadLettered, decode, encode, schema
from pipeline.log.broker import Broker
from pipeline.log.fast_client import Pulled
from tests.kits.waiting import until_true
from tests.pipeline.commands.test_dead_letters import deliver_in_vain
from tests.store.kit import StoreProcess, exchange, publish, run_of_one_step, store_all, stored, until_acked


async def test_every_event_lands_once_and_is_acknowledged(
    broker: Broker, running_store: StoreProcess, tmp_path: Path
) -> None:
    """Also if the consumer forgets everything, so that the server delivers all of it again."""
    events = run_of_one_step()
    await publish(broker, events)
    await store_all(broker, running_store)
    await broker.js.delete_consumer("ROLLOUTS", "store-rollouts")
    await broker.provision()
    await publish(broker, [exchange("t0", 2)])
    await store_all(broker, running_store)
    assert sum(len(stored(tmp_path / "store", tag)) for tag in schema.tables()) == len(events) + 1
    assert stored(tmp_path / "store", "rollout.exchange")[:4] == [2, 3, 6, 7]


async def test_stopping_while_an_event_is_read_writes_it_and_those_behind_it(
    broker: Broker, running_store: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its content may be in the log's object store, which takes a while. The process is stopped then."""
    admit, reading, calls = Broker.usable_event, anyio.Event(), itertools.count(1)

    async def admit_slowly(self: Broker, message: Pulled, spec: streams.ConsumerSpec) -> AnyEvent | None:
        if spec.name == "store-rollouts" and next(calls) == 2:
            reading.set()
            await anyio.sleep_forever()
        return await admit(self, message, spec)

    monkeypatch.setattr(Broker, "usable_event", admit_slowly)
    await publish(broker, [exchange("t", seq) for seq in range(5)])
    async with running_store(flush_s=60.0):
        with anyio.fail_after(60):
            await reading.wait()
            while (await broker.consumer_info(streams.consumer("store-rollouts"))).num_ack_pending < 5:
                await anyio.sleep(0.02)
    assert stored(tmp_path / "store", "rollout.exchange") == [1, 2, 3, 4, 5]


async def test_what_fits_no_table_goes_to_the_dead_and_the_rest_is_stored(
    broker: Broker, running_store: StoreProcess, tmp_path: Path
) -> None:
    await publish(broker, [exchange("t", 0), exchange("t", 1, step=2**63), exchange("t", 2)])
    await broker.js.publish("rollout.exchange.p.t", b"\xc1")
    async with running_store():
        await until_acked(broker)
        await until_true(lambda: len(stored(tmp_path / "store", "dead.letter")) >= 2)
    buried = {d.event.reason: d.event.payload for d in await broker.read(DeadLettered)}  # type: ignore[union-attr]
    there = (await broker.js.get_msg("ROLLOUTS", 2)).data
    assert buried == {"unstorable": there, "undecodable": b"\xc1"}
    assert stored(tmp_path / "store", "rollout.exchange") == [1, 3]


async def test_what_a_store_dies_over_again_and_again_goes_to_the_dead(
    nats_config: NatsConfig, running_store: StoreProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple(dataclasses.replace(c, max_deliver=2) for c in streams.CONSUMERS)
    monkeypatch.setattr(streams, "CONSUMERS", few)
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [exchange("t", 0)])
        await deliver_in_vain(broker, "store-rollouts", 2)
        await publish(broker, [exchange("t", 1)])
        await store_all(broker, running_store)
        (letter,) = await broker.read(DeadLettered)
        assert isinstance(letter.event, DeadLettered)
        assert (letter.event.reason, letter.event.stream_seq, letter.event.deliveries) == ("max_deliver", 1, 3)
        at = decode(letter.event.payload).at  # type: ignore[union-attr]
        assert letter.event.payload == encode(exchange("t", 0, at=at))
        assert stored(tmp_path / "store", "rollout.exchange") == [2]
        await dead.retry(broker, letter)
        await store_all(broker, running_store)
    assert stored(tmp_path / "store", "rollout.exchange") == [2, 3]


async def test_what_waits_in_a_living_store_is_not_delivered_again(
    nats_config: NatsConfig, running_store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A store on a busy machine may be silent for seconds.
    quick = tuple(dataclasses.replace(c, ack_wait_s=10.0, max_deliver=1) for c in streams.CONSUMERS)
    monkeypatch.setattr(streams, "CONSUMERS", quick)
    async with Broker.connect(nats_config) as broker:
        await publish(broker, [exchange("t", seq) for seq in range(3)])
        async with running_store(flush_s=12.0):
            await until_acked(broker)
        info = await broker.consumer_info(streams.consumer("store-rollouts"))
        assert info.delivered is not None
        assert info.delivered.consumer_seq == 3
        assert await broker.read(DeadLettered) == []
