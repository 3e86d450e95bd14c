"""Exchanges that the log holds as continuations: written by gateways, read whole by everybody, on a real server."""

import os
from collections.abc import Sequence

import msgspec
import pytest

from judge.ruler.transcripts import load_transcript
from pipeline.chat.sampling import Defaults
from pipeline.config import Config, NatsConfig, TrainerConfig
from pipeline.events import (
    ClaimCheck,
    Continuation,
    DeadLettered,
    ExchangeRecorded,
    GroupScored,
    Member,
    TrajectoryOpened,
    decode,
)
from pipeline.log import history
from pipeline.log.broker import Broker, HistoryGoneError
from pipeline.log.exchanges import ExchangeNotWholeError
from pipeline.log.messages import Place
from rollout_gateway.access.trajectory_tokens import TrajectoryTokens
from rollout_gateway.capture.registry import NOT_RECORDED, Completion, Registry
from rollout_gateway.capture.trajectory import Trajectory
from tests.kits.conversations import growing
from tests.kits.log import take
from trainer.batches.groups import AdmittedGroup, Refusal
from trainer.batches.histories import Histories

KEYS = {"project": "p", "trajectory": "t"}


def registry(broker: Broker) -> Registry:
    return Registry(broker, "p", TrajectoryTokens(b"0" * 32, "p"))


async def opened(at: Registry) -> Trajectory:
    return await at.open(TrajectoryOpened(project="p", trajectory="t", model="m", group="g"), "")


async def record(trajectory: Trajectory, exchanges: Sequence[ExchangeRecorded]) -> list[ExchangeRecorded]:
    """Record each of `exchanges` under the next number; return them as recorded."""
    out = []
    for one in exchanges:
        seq = await trajectory.record([one])
        out.append(msgspec.structs.replace(one, seq=seq))
    return out


async def forms(broker: Broker) -> list[object]:
    """What lies on the trajectory's subject: claim checks replaced by what they stand for."""
    out: list[object] = []
    async for message in broker.messages("ROLLOUTS", subject="rollout.exchange.p.t"):
        form = decode(message.payload)
        out.append(decode(await broker.get_object(form.bucket, form.object)) if isinstance(form, ClaimCheck) else form)
    return out


async def whole(broker: Broker) -> list[ExchangeRecorded]:
    return [r.event for r in await broker.read(ExchangeRecorded, **KEYS)]


async def test_readers_and_consumers_get_whole_exchanges(nats_config: NatsConfig) -> None:
    forgetful = msgspec.structs.replace(nats_config, exchange_memory_bytes=0)
    async with Broker.connect(nats_config) as broker:
        recorded = await record(await opened(registry(broker)), growing(6))
        assert [type(f) for f in await forms(broker)] == [ExchangeRecorded] + 5 * [Continuation]
    for config in (nats_config, forgetful):
        async with Broker.connect(config) as broker:
            newest = await broker.read_last(ExchangeRecorded, **KEYS)
            assert newest is not None
            assert newest.event == recorded[-1]
            assert (await broker.read_at(ExchangeRecorded, newest.seq - 2)).event == recorded[-3]
            assert await whole(broker) == recorded
            # From the middle on.
            assert [r.event for r in await broker.read(ExchangeRecorded, start_seq=newest.seq, **KEYS)] == recorded[-1:]
    async with Broker.connect(forgetful) as broker, broker.consume("store-rollouts") as messages:
        taken = await take(messages, 8)
        assert [d.event for d in taken[2:]] == recorded  # after the openings of the group and of the run


async def test_an_exchange_too_large_for_the_log_is_continued(nats_config: NatsConfig) -> None:
    large = os.urandom(1_000_000).hex()
    exchanges = [
        msgspec.structs.replace(e, request=b'{"messages":["%s"]' % large.encode() + bytes(e.request))
        for e in growing(3)
    ]
    async with Broker.connect(nats_config) as broker:
        recorded = await record(await opened(registry(broker)), exchanges)
        assert [type(f) for f in await forms(broker)] == [ExchangeRecorded, Continuation, Continuation]
        assert (await broker.stream_info("OBJ_CLAIMS_ROLLOUTS")).state.bytes < 3_000_000  # one object
    async with Broker.connect(nats_config) as broker:
        assert await whole(broker) == recorded


async def test_a_page_ends_where_its_whole_exchanges_are_large(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the log they are small: the first one a claim check, the others continuations."""
    exchanges = [
        msgspec.structs.replace(e, request=b'{"note":"%b","n":%d}' % (b"x" * 1_000_000, n))
        for n, e in enumerate(growing(5))
    ]
    known = registry(broker)
    recorded = await record(await opened(known), exchanges)
    monkeypatch.setattr(history, "_WHOLE_BYTES", 1_500_000)
    sizes, seq, more = [], 0, True
    while more:
        events, seq, more, _ = await broker.read_page(ExchangeRecorded, seq + 1, **KEYS)
        sizes.append(len(events))
    assert sizes == [2, 2, 1]
    assert [call async for call in known.log.calls("t")] == recorded
    assert await whole(broker) == recorded


async def test_a_lost_predecessor_makes_the_trajectory_unusable(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        trajectory = await opened(registry(broker))
        recorded = await record(trajectory, growing(5))
        await broker.js.delete_msg("ROLLOUTS", trajectory.recorded.last_stream_seq - 2)  # the third of five
    async with Broker.connect(nats_config) as broker:
        assert await whole(broker) == recorded[:2]
        newest = trajectory.recorded.last_stream_seq
        with pytest.raises(
            ExchangeNotWholeError, match=r"exchange 4\.0 of trajectory 't' can't be read: exchange 2\.0"
        ):
            await broker.read_at(ExchangeRecorded, newest)
        assert await broker.read(DeadLettered) == []  # its readers are told; it is a sound message
        with pytest.raises(HistoryGoneError, match="2 of 5 exchanges can be read"):
            await load_transcript(broker, "p", "t", 5)
        member = Member(trajectory="t", reward=1.0, exchanges=5, completed_seq=9)
        group = AdmittedGroup(GroupScored(project="p", model="m", group="g", judge="j", members=(member,)), Place(1, 0))
        refusal = await Histories(broker, TrainerConfig(), Defaults(), None, Config().may_train).read(group)
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "history_gone"
        assert "2 of 5 exchanges can be read" in refusal.detail
        # A gateway that takes over numbers its calls after those that it can't read, and completes without a result.
        here = registry(broker)
        (more,) = await record(await here.find("t"), growing(1, start=5))
        assert more.seq == 5
        done = await here.complete("t", Completion(reward=1.0))
        assert (done.outcome, done.metrics[NOT_RECORDED]) == ("no_result", 2)
        # The store, which has to write every event, gets dead letters.
        async with broker.consume("store-rollouts") as messages:
            await take(messages, 5)
        letters = [r.event for r in await broker.read(DeadLettered)]
        assert [x.stream_seq for x in letters] == [newest - 1, newest]
        assert "can't be read: exchange 2.0" in letters[0].detail


async def test_what_was_put_back_whole_is_continued(nats_config: NatsConfig) -> None:
    """`journeywork replay` publishes exchanges from the store, whole."""
    async with Broker.connect(nats_config) as broker:
        trajectory = await opened(registry(broker))
        recorded = await record(trajectory, growing(4))
        for seq in (trajectory.recorded.last_stream_seq - 3, trajectory.recorded.last_stream_seq - 2):
            await broker.js.delete_msg("ROLLOUTS", seq)
    async with Broker.connect(nats_config) as broker:
        assert await whole(broker) == []
        for number in (1, 0):
            await broker.publish(recorded[number], message_id=f"put-back/{number}")
        assert sorted(await whole(broker), key=lambda e: e.seq) == recorded
