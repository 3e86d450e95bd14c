"""A message that is not an event is skipped by every reader and becomes a dead letter once."""

import msgspec
import pytest

from pipeline.commands import dead_letters as dead
from pipeline.config import NatsConfig
from pipeline.errors import HistoryGoneError
from pipeline.events import DeadLettered, Event, ExchangeRecorded, TrajectoryOpened, decode, encode, pack_ids, pack_seqs
from pipeline.log.broker import READER, Broker
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import Completion, Registry
from tests.kits.events import checkpoint, exchange

GARBAGE = b"\xc1garbage"


async def throw(broker: Broker, subject: str, payload: bytes = GARBAGE) -> int:
    return int((await broker.js.publish(subject, payload)).seq)


async def buried(broker: Broker) -> list[DeadLettered]:
    return [r.event for r in await broker.read(DeadLettered)]


async def test_reads_skip_it_and_make_one_dead_letter_of_it(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        await broker.publish(exchange(seq=0))
        seq = await throw(broker, "rollout.exchange.p.t1")
        before = await broker.read_last(ExchangeRecorded, project="p", trajectory="t1")
        assert before is not None
        assert before.seq == 1  # the newest that is an event
        assert await broker.read_last(ExchangeRecorded, project="p", trajectory="none") is None
        await throw(broker, "rollout.exchange.p.none")
        assert await broker.read_last(ExchangeRecorded, project="p", trajectory="none") is None
        with pytest.raises(HistoryGoneError, match=f"message {seq} of ROLLOUTS can't be decoded"):
            await broker.read_at(ExchangeRecorded, seq)
        found, last, _, _ = await broker.read_page(ExchangeRecorded, project="p", trajectory="t1")
        assert ([r.seq for r in found], last) == ([1], seq)
    # Another service, and the same one after a restart, find it again: one letter.
    for _ in range(2):
        async with Broker.connect(nats_config) as broker:
            assert len(await broker.read(ExchangeRecorded)) == 1
    async with Broker.connect(nats_config) as broker:
        letters = await buried(broker)
        assert [(x.stream, x.stream_seq, x.consumer, x.reason, x.payload) for x in letters] == [
            ("ROLLOUTS", seq, READER, "undecodable", GARBAGE),
            ("ROLLOUTS", seq + 1, READER, "undecodable", GARBAGE),
        ]
        assert letters[0].original_subject == "rollout.exchange.p.t1"
        # A retry takes a reader's letter off the list; the message is still there, and still unreadable.
        for letter in await broker.read(DeadLettered):
            await dead.retry(broker, letter)
        assert await buried(broker) == []
        assert (await broker.stream_info("ROLLOUTS")).state.messages == 3
        await broker.read(ExchangeRecorded)
        assert len(await buried(broker)) == 2


BROKEN: dict[str, Event] = {
    "prompt_ids": msgspec.structs.replace(exchange(), prompt_ids=b"odd"),
    "sampled_ids": msgspec.structs.replace(exchange(), sampled_ids=pack_ids([1]) + b"x"),
    "logprobs": msgspec.structs.replace(exchange(), logprobs=b"xx"),
    "group_seqs": msgspec.structs.replace(checkpoint(2), groups=("g",), group_seqs=b"seven b"),
    "group_times": msgspec.structs.replace(
        checkpoint(2), groups=("g",), group_seqs=pack_seqs([1]), group_times=b"nine byte"
    ),
    "3 groups with 2 seq": msgspec.structs.replace(checkpoint(2), groups=("a", "b", "c"), group_seqs=pack_seqs([1, 2])),
    "1 stream times": msgspec.structs.replace(
        checkpoint(2), groups=("a", "b"), group_seqs=pack_seqs([1, 2]), group_times=pack_seqs([3])
    ),
}


@pytest.mark.parametrize("why", BROKEN)
def test_arrays_that_can_not_be_unpacked_are_no_event(why: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=why):
        decode(encode(BROKEN[why]))


async def test_garbage_on_a_subject_that_holds_one_event_does_not_keep_the_event_out(broker: Broker) -> None:
    await throw(broker, "policy.checkpoint.p.m.1")
    first = await broker.publish(checkpoint(1))
    assert not first.duplicate
    again = await broker.publish(checkpoint(1))
    assert (again.seq, again.duplicate) == (first.seq, True)
    await throw(broker, "policy.checkpoint.p.m.1")
    again = await broker.publish(checkpoint(1))
    assert (again.seq, again.duplicate) == (first.seq, True)
    assert len(await buried(broker)) == 2


async def test_a_run_goes_on_behind_it(broker: Broker) -> None:
    registry = Registry(broker, "p", TrajectoryTokens(b"secret", "p"))
    for subject in ("rollout.opened.p.t1", "rollout.exchange.p.t1", "rollout.completed.p.m.t1"):
        await throw(broker, subject)
    await registry.open(TrajectoryOpened(project="p", trajectory="t1", model="m", group="g"), "")

    async def call(registry: Registry) -> None:
        await (await registry.find("t1")).record([exchange("t1")])

    await call(registry)
    await throw(broker, "rollout.exchange.p.t1")
    await call(registry)
    # Another replica, which knows nothing of the run.
    other = Registry(broker, "p", TrajectoryTokens(b"secret", "p"))
    await call(other)
    ended = await other.complete("t1", Completion(reward=1.0))
    assert ended.exchanges == 3
    history = await broker.read(ExchangeRecorded, project="p", trajectory="t1")
    assert [r.event.seq for r in history] == [0, 1, 2]
