"""A log whose streams are divided: where events lie, and that every kind of access finds them."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import msgspec
import pytest

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.errors import BrokerError
from pipeline.events import (
    EVENTS,
    DeadLettered,
    Event,
    ExchangeRecorded,
    GroupDiscarded,
    GroupScored,
    TrajectoryCompleted,
    TrajectoryOpened,
    encode,
)
from pipeline.log import dead_letters, provision
from pipeline.log.broker import Broker
from pipeline.log.consumer import Consumption, Delivery
from pipeline.log.follow import follow_events
from pipeline.log.subjects import keys_of
from tests.conftest import NatsServer
from tests.pipeline.log.test_broker import completed, exchange
from tests.pipeline.log.test_subjects import made

pytestmark = pytest.mark.anyio

FOUR = streams.Layout(4)


@pytest.fixture
def divided_config(nats_config: NatsConfig) -> NatsConfig:
    return msgspec.structs.replace(nats_config, partitions=4)


# -- names -------------------------------------------------------------------------------------------------------------


def test_one_partition_has_the_streams_and_subjects_of_the_table() -> None:
    one = streams.UNDIVIDED
    assert one.streams == streams.STREAMS
    assert one.consumers == streams.CONSUMERS
    assert one.prefixes == {}
    assert one.on_log("rollout.exchange.p.t") == "rollout.exchange.p.t"
    assert one.streams_of("rollout.completed.p.>") == ("ROLLOUTS",)


def test_partitions_share_the_bytes_of_their_stream() -> None:
    assert sum(s.share for s in FOUR.streams) == pytest.approx(sum(s.share for s in streams.STREAMS))
    assert [s.name for s in FOUR.streams].count("POLICY") == 1
    assert {c.durable for c in FOUR.consumers_of(streams.consumer("judge"))} == {
        f"judge-{i}" for i in range(4)
    }
    assert FOUR.consumers_of(streams.consumer("judge-timers")) == (streams.consumer("judge-timers"),)


@pytest.mark.parametrize(
    ("subject", "same"),
    [
        # The events of a trajectory; those of a group, in both streams.
        ("rollout.opened.p.t", "rollout.exchange.p.t"),
        ("rollout.completed.p.m.g.t", "rollout.completed.p.m.g.other"),
        ("rollout.completed.p.m.g.t", "rollout.timeout.p.m.g.val"),
        ("rollout.completed.p.m.g.t", "group.scored.p.m.g.j.main"),
        ("group.scored.p.m.g.j.main", "group.discarded.p.m.g.>"),
        ("group.scored.p.m.g.j.main", "group.*.p.m.g.>"),
    ],
)
def test_what_belongs_together_lies_in_one_partition(subject: str, same: str) -> None:
    assert FOUR.partition(subject) == FOUR.partition(same) >= 0


@pytest.mark.parametrize(
    "subject", ["rollout.opened.p.>", "rollout.completed.p.m.>", "group.scored.>", "rollout.>"]
)
def test_a_filter_that_leaves_the_partition_open_names_all(subject: str) -> None:
    assert len(FOUR.streams_of(subject)) == 4
    with pytest.raises(ValueError, match="partitions"):
        FOUR.stream_of(subject)


def test_every_partition_is_used_evenly() -> None:
    used = [FOUR.partition(f"rollout.exchange.p.t{i}") for i in range(4000)]
    assert all(900 < used.count(i) < 1100 for i in range(4))


@pytest.mark.parametrize("cls", EVENTS, ids=lambda cls: cls.__name__)
def test_the_subject_of_every_event_chooses_its_stream(cls: type[Event]) -> None:
    subject = made(cls).subject()
    stream = FOUR.stream_of(subject)
    assert streams.stream_of_subject(FOUR.on_log(subject)) == stream
    assert streams.without_partition(FOUR.on_log(subject)) == subject


# -- the log -----------------------------------------------------------------------------------------------------------


async def _taken(consumption: Consumption, count: int) -> list[Delivery]:
    found: list[Delivery] = []
    with anyio.fail_after(30):
        while len(found) < count:
            found += await consumption.batch(64)
    return found


def _scored(group: str) -> GroupScored:
    return GroupScored(project="p", model="m", group=group, judge="j", members=())


async def test_events_are_published_read_and_followed_in_their_partitions(divided_config: NatsConfig) -> None:
    async with Broker.connect(divided_config) as broker:
        names = [f"t{i}" for i in range(24)]
        acks = {name: await broker.publish(exchange(name)) for name in names}
        assert {ack.stream for ack in acks.values()} == {f"ROLLOUTS_{i}" for i in range(4)}
        again = await broker.publish(exchange(names[0]))
        assert (again.duplicate, again.seq) == (True, acks[names[0]].seq)

        every = await broker.read(ExchangeRecorded)
        assert [r.event.trajectory for r in every] == names  # in the order of their stream times
        assert {r.subject for r in every} == {f"rollout.exchange.p.{name}" for name in names}
        for name in names:
            keys = {"project": "p", "trajectory": name}
            (one,) = await broker.read(ExchangeRecorded, **keys)
            last = await broker.read_last(ExchangeRecorded, **keys)
            assert last is not None
            assert one.event == last.event == (await broker.read_at(ExchangeRecorded, one.seq, **keys)).event
            assert await broker.count(ExchangeRecorded, **keys) == 1
            assert one.stream == acks[name].stream == broker.stream_of(ExchangeRecorded, **keys)
            assert await broker.holds(one.stream, one.place)
        assert (await broker.read_last(ExchangeRecorded)) is not None

        followed: list[str] = []
        with anyio.fail_after(30):
            for stream in broker.streams_of(ExchangeRecorded):
                wanted = [r.event.trajectory for r in every if r.stream == stream]
                events = follow_events(broker, [ExchangeRecorded], lambda: 1, within=stream)
                while wanted:
                    recorded = await anext(events)
                    assert recorded.event.trajectory == wanted.pop(0)
                    followed.append(recorded.event.trajectory)
                await events.aclose()
        assert sorted(followed) == sorted(names)


async def test_an_event_whose_subject_is_its_identity_is_on_the_log_once(divided_config: NatsConfig) -> None:
    async with Broker.connect(divided_config) as broker:
        opened = TrajectoryOpened(project="p", trajectory="t", model="m", group="g")
        first = await broker.publish(opened)
        again = await broker.publish(opened, message_id="another")
        assert (again.stream, again.seq, again.duplicate) == (first.stream, first.seq, True)
        ended = await broker.publish(completed("t"))
        assert ended.stream == broker.stream_of(TrajectoryCompleted, **keys_of(completed("t")))


async def test_large_events_go_to_the_bucket_of_their_partition(
    start_nats: Callable[..., NatsServer],
) -> None:
    config = NatsConfig(url=start_nats(max_payload=16_384).url, partitions=4)
    async with Broker.connect(config) as broker:
        large = exchange("t", request=b'"' + b"x" * 60_000 + b'"')
        ack = await broker.publish(large)
        number = ack.stream.removeprefix("ROLLOUTS_")
        assert await broker.subjects(f"OBJ_CLAIMS_ROLLOUTS_{number}", "$O.>")
        (found,) = await broker.read(ExchangeRecorded, project="p", trajectory="t")
        assert found.event == large


async def test_one_consumption_takes_from_all_partitions(divided_config: NatsConfig) -> None:
    async with Broker.connect(divided_config) as broker:
        groups = {f"g{i}" for i in range(40)}
        for group in groups:
            await broker.publish(_scored(group))
        async with broker.consume("trainer") as consumption:
            held = await _taken(consumption, len(groups))
            assert {d.event.group for d in held if isinstance(d.event, GroupScored)} == groups
            assert {d.stream for d in held} == {f"GROUPS_{i}" for i in range(4)}
            assert all(d.subject == d.event.subject() for d in held)
            assert await broker.lag("trainer") == len(groups)
            for delivery in held[:30]:
                await delivery.ack(confirmed=True)
        async with broker.consume("trainer") as consumption:  # what was held was given back
            again = await _taken(consumption, 10)
            assert {(d.stream, d.seq) for d in again} == {(d.stream, d.seq) for d in held[30:]}
            for delivery in again:
                await delivery.ack(confirmed=True)
        assert await broker.lag("trainer") == 0


async def test_a_batch_takes_no_more_than_asked_for(divided_config: NatsConfig) -> None:
    async with Broker.connect(divided_config) as broker:
        for i in range(40):
            await broker.publish(_scored(f"g{i}"))
        async with broker.consume("trainer") as consumption:
            found: list[Delivery] = []
            with anyio.fail_after(30):
                while len(found) < 40:
                    batch = await consumption.batch(3)
                    assert len(batch) <= 3
                    found += batch
        assert len({(d.stream, d.seq) for d in found}) == 40


async def test_a_dead_letter_is_delivered_again_in_its_partition(divided_config: NatsConfig) -> None:
    async with Broker.connect(divided_config) as broker:
        await broker.publish_raw("group.scored.p.m.bad.j.main", b"\xc1", {}, message_id="bad")
        await broker.publish(_scored("good"))
        async with broker.consume("trainer") as consumption:
            (good,) = await _taken(consumption, 1)
            with anyio.fail_after(30):
                while not (letters := await broker.read(DeadLettered, consumer="trainer")):
                    await consumption.batch(1)
            await good.ack()
            (letter,) = letters
            assert letter.event.original_subject == "group.scored.p.m.bad.j.main"
            assert letter.event.stream == FOUR.stream_of("group.scored.p.m.bad.j.main")
            event = _scored("bad")
            letter.event = msgspec.structs.replace(letter.event, payload=encode(event))
            await dead_letters.retry(broker, letter)
            (again,) = await _taken(consumption, 1)
            assert again.event == event
            assert again.stream == letter.event.stream
            await again.ack()
        assert await broker.read(DeadLettered) == []


# -- the number of partitions ------------------------------------------------------------------------------------------


async def test_the_number_is_kept_on_the_log(nats_config: NatsConfig, divided_config: NatsConfig) -> None:
    async with Broker.connect(divided_config) as broker:
        await broker.publish(completed("t"))
    eight = msgspec.structs.replace(nats_config, partitions=8)
    for wrong in (nats_config, eight):
        for provision_ in (True, False):
            with pytest.raises(BrokerError, match=r"has 4 partitions.*set nats\.partitions = 4"):
                async with Broker.connect(wrong, provision=provision_):
                    pass
    adopted = msgspec.structs.replace(nats_config, partitions=0)
    async with Broker.connect(adopted, provision=False) as broker:
        assert broker.layout == FOUR
        assert len(await broker.read(TrajectoryCompleted)) == 1


async def test_a_log_of_an_earlier_version_has_one_partition(
    nats_config: NatsConfig, divided_config: NatsConfig
) -> None:
    async with Broker.connect(nats_config) as broker:
        assert not (await broker.stream_info("DEAD")).config.metadata.get("journeywork.partitions")
    with pytest.raises(BrokerError, match=r"has 1 partition, and nats\.partitions is 4"):
        async with Broker.connect(divided_config):
            pass


async def test_a_log_is_divided_anew_once_everything_was_read(
    nats_config: NatsConfig, divided_config: NatsConfig
) -> None:
    async with Broker.connect(nats_config) as broker:
        await broker.publish(_scored("g"))
        with pytest.raises(BrokerError, match="has not read all of GROUPS"):
            await provision.repartition(broker, 4)
        for name in ("trainer", "store-groups"):
            async with broker.consume(name) as consumption:
                for delivery in await _taken(consumption, 1):
                    await delivery.ack(confirmed=True)
        await provision.repartition(broker, 4)
    async with Broker.connect(divided_config) as broker:
        assert (await broker.publish(_scored("g2"))).stream.startswith("GROUPS_")
        assert [r.event.group for r in await broker.read(GroupScored)] == ["g2"]
        assert await broker.read(GroupDiscarded) == []
