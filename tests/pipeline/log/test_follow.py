"""Following a stream through a power cut that takes the end of the log, and through connections that break."""

import asyncio
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import nats.errors
import pytest

from pipeline.config import NatsConfig
from pipeline.errors import LogShrankError
from pipeline.events import CheckpointPublished
from pipeline.log import follow
from pipeline.log.broker import Broker
from pipeline.log.messages import Place
from rollout_gateway.serving.policies import Policies
from tests.conftest import NatsServer
from tests.kits.events import checkpoint
from tests.kits.power import Power
from tests.kits.waiting import until_true


async def test_a_log_that_lost_its_end_ends_who_follows_it(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    power = Power(nats_server, tmp_path)
    async with Broker.connect(nats_config) as broker:
        await broker.publish(checkpoint(1))
    await power.synced()
    async with Broker.connect(nats_config) as broker:
        for step in range(2, 5):
            await broker.publish(checkpoint(step))
        policies = Policies("p", ["m"])
        await policies.rebuild(broker)

        async def follow_to_the_end() -> None:
            with pytest.raises(LogShrankError, match="lost its end: POLICY no longer holds message 4"):
                await policies.follow(broker, lambda _: None)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tg:
                tg.start_soon(follow_to_the_end)
                await power.cut()
                await broker.publish(checkpoint(2))


async def test_messages_that_retention_took_are_no_loss(
    nats_server: NatsServer, nats_config: NatsConfig, tmp_path: Path
) -> None:
    """The reader's last message is deleted and the server starts anew: nothing is read twice."""
    async with Broker.connect(nats_config) as broker, anyio.create_task_group() as tg:
        for step in range(1, 4):
            await broker.publish(checkpoint(step))
        policies, seen = Policies("p", ["m"]), list[str]()
        await policies.rebuild(broker)
        apply = policies.apply

        def counted(recorded: object) -> bool:
            seen.append(recorded.event.version)  # type: ignore[attr-defined]
            return apply(recorded)  # type: ignore[arg-type]

        policies.apply = counted  # type: ignore[method-assign, assignment]
        tg.start_soon(policies.follow, broker, lambda _: None)
        await broker.publish(checkpoint(4))
        await until_true(lambda: seen == ["m@4"])
        await broker.js.delete_msg("POLICY", 4)
        nats_server.kill()
        await anyio.to_thread.run_sync(nats_server.start)
        await broker.publish(checkpoint(5))
        await until_true(lambda: len(seen) == 2)
        assert seen == ["m@4", "m@5"]
        tg.cancel_scope.cancel()


async def test_between_two_servers_no_consumer_is_created(nats_server: NatsServer, broker: Broker) -> None:
    """nats-py would leave out its name, so that a service's right to create it would not cover the request."""
    nats_server.kill()
    await until_true(lambda: not broker.client.is_connected)
    with pytest.raises(nats.errors.ConnectionReconnectingError):
        await follow._create_consumer(broker, "POLICY", ["policy.>"], Place(0, 0))
    await anyio.to_thread.run_sync(nats_server.start)
    await until_true(lambda: broker.client.is_connected)
    assert await follow._create_consumer(broker, "POLICY", ["policy.>"], Place(0, 0))


class Lossy:
    """A relay to a NATS server that can lose what the server sends, as a connection does that breaks."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []
        self.losing = False
        self.lost = b""

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += writer, to_server
        await asyncio.gather(self._copy(reader, to_server), self._copy(from_server, writer, lossy=True))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, lossy: bool = False) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                if lossy and self.losing:
                    self.lost += data
                    continue
                writer.write(data)
                await writer.drain()
        writer.close()

    def break_off(self) -> None:
        self.losing = False
        for writer in self._writers:
            writer.close()


@pytest.mark.parametrize("more", [False, True])
async def test_what_a_broken_connection_lost_is_delivered_again(
    nats_server: NatsServer, nats_config: NatsConfig, more: bool
) -> None:
    """The server counts as delivered what it wrote to the connection: nobody acknowledges it."""
    lossy, seen = Lossy(nats_server.port), list[str]()
    relay = await asyncio.start_server(lossy.relay, "127.0.0.1", 0)
    through = msgspec.structs.replace(nats_config, url=f"nats://127.0.0.1:{relay.sockets[0].getsockname()[1]}")
    async with (
        relay,
        Broker.connect(nats_config) as broker,
        Broker.connect(through, provision=False) as follower,
        anyio.create_task_group() as tg,
    ):

        async def read() -> None:
            async for recorded in follow.follow_events(follower, [CheckpointPublished], lambda: 1):
                seen.append(recorded.event.version)

        tg.start_soon(read)
        await broker.publish(checkpoint(1))
        await until_true(lambda: len(seen) == 1)
        lossy.losing = True
        for step in (2, 3):
            await broker.publish(checkpoint(step))
        await until_true(lambda: lossy.lost.count(b"$JS.ACK.POLICY.") >= 2)
        lossy.break_off()
        if more:
            await until_true(lambda: follower.client.stats["reconnects"] > 0 and follower.client.is_connected)
            await broker.publish(checkpoint(4))
        await until_true(lambda: len(seen) == 3 + more)
        assert seen == ["m@1", "m@2", "m@3", "m@4"][: 3 + more]
        tg.cancel_scope.cancel()
