"""The oldest events go when their subjects need more memory than the NATS server may use."""

from pipeline.config import NatsConfig
from pipeline.events import TrajectoryOpened
from pipeline.log import memory
from pipeline.log.broker import Broker
from tests.kits.events import exchange
from tests.kits.log import take

RUNS, MOST = 100, 50


async def fill(broker: Broker) -> None:
    for i in range(RUNS):
        await broker.publish(TrajectoryOpened(project="p", trajectory=f"t{i}", model="m", group="g"))
        await broker.publish(exchange(f"t{i}"))


async def read_everything(broker: Broker, *, up_to: int = 2 * RUNS) -> None:
    async with broker.consume("store-rollouts") as consumption:
        for delivery in await take(consumption, up_to):
            await delivery.ack(confirmed=True)


def budget(subjects: int) -> int:
    return int(subjects * memory.SUBJECT_BYTES / 0.8) + 1


async def test_the_oldest_events_go_until_their_subjects_fit(broker: Broker) -> None:
    await fill(broker)
    await read_everything(broker)
    await memory.trim(broker, budget(MOST))
    state = (await broker.stream_info("ROLLOUTS")).state
    assert 0.8 * MOST <= await broker.count_subjects("ROLLOUTS") <= MOST
    assert state.last_seq == 2 * RUNS
    newest = await broker.read(TrajectoryOpened)
    assert newest[-1].event.trajectory == f"t{RUNS - 1}"
    await memory.trim(broker, budget(MOST))
    assert (await broker.stream_info("ROLLOUTS")).state.first_seq == state.first_seq


async def test_nothing_goes_that_the_store_has_not_read(broker: Broker) -> None:
    await fill(broker)
    await memory.trim(broker, budget(MOST))
    assert (await broker.stream_info("ROLLOUTS")).state.first_seq == 1
    await read_everything(broker, up_to=20)
    await memory.trim(broker, budget(MOST))
    assert (await broker.stream_info("ROLLOUTS")).state.first_seq == 21


def test_up_says_how_long_the_log_keeps_runs() -> None:
    bounded = memory.retention(NatsConfig(max_memory=2_100_000_000))
    assert "48 h at up to 5.8 runs a second" in bounded
    assert "the newest 1,000,000 runs" in bounded
    assert "nats.max_memory is not set" in memory.retention(NatsConfig())
