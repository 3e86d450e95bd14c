"""Reading the log in tests, and waiting for its consumers."""

import anyio

from pipeline.events import AnyEvent
from pipeline.log.broker import Broker
from pipeline.log.consumer import Consumption, Delivery
from pipeline.log.history import Reader
from pipeline.log.messages import LogEntry
from tests.kits.waiting import until


async def read_stream(reader: Reader, stream: str) -> list[LogEntry[AnyEvent]]:
    """Every event of a stream, of any class, in order."""
    found = [await reader.recorded(stream, message) async for message in reader.messages(stream)]
    return [recorded for recorded in found if recorded is not None]


async def acknowledged(broker: Broker, prefix: str) -> None:
    """Return once all consumers whose names begin with `prefix` have acknowledged everything."""

    async def done() -> bool:
        return not await broker.lag(prefix)

    await until(done)


async def emptied(broker: Broker, stream: str) -> None:
    """Return once a stream holds no message."""

    async def done() -> bool:
        return not (await broker.stream_info(stream)).state.messages

    await until(done)


async def take(messages: Consumption, n: int) -> list[Delivery]:
    """The next `n` deliveries. They may come late, and in parts."""
    found: list[Delivery] = []
    with anyio.fail_after(60):
        while len(found) < n:
            found += await messages.batch(n - len(found))
    return found
