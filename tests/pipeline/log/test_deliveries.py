"""Deliveries are cut out of the connection's bytes wherever these are broken, and everything else reaches nats-py's parser."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from nats.protocol.parser import Parser

from pipeline import streams
from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.log.deliveries import Pulled, Splitter, acknowledge
from pipeline.log.pull import ConsumerGoneError, pulling
from tests.conftest import NatsServer
from tests.pipeline.log.test_broker import exchange

pytestmark = pytest.mark.anyio


class Client:
    """What nats-py's parser calls: keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._ps = Parser(self)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        self.seen.append((sid, subject, reply, bytes(data), headers))

    async def _process_ping(self) -> None:
        self.seen.append(("ping",))

    async def _process_pong(self) -> None:
        self.seen.append(("pong",))


def delivery(i: int, sid: int, size: int, reply: bool = True, headers: bool = True) -> bytes:
    """One delivery as the server writes it; its payload holds what might be taken for a command."""
    data = (b"HMSG x 7 y 1 2\r\nPING\r\n%d" % i).ljust(size, b"\r")
    to = b" $JS.ACK.S.c.1.%d.%d.1000.0" % (i, i) if reply else b""
    if not headers:
        return b"MSG s.%d %d%b %d\r\n%b\r\n" % (i, sid, to, len(data), data)
    head = b"NATS/1.0\r\nNats-Msg-Id: %d\r\ntraceparent: t%d\r\n\r\n" % (i, i)
    return b"HMSG s.%d %d%b %d %d\r\n%b%b\r\n" % (i, sid, to, len(head), len(head) + len(data), head, data)


@pytest.mark.parametrize("seed", range(40))
async def test_however_the_bytes_are_broken(seed: int) -> None:
    rng = random.Random(seed)
    client = Client()
    taken: list[Pulled] = []
    splitter = Splitter.of(client)  # type: ignore[arg-type]
    assert Splitter.of(client) is splitter  # type: ignore[arg-type]
    splitter.hand(7, taken.append)
    wanted, others, stream = [], 0, b""
    for i in range(200):
        kind = rng.choice(["ours"] * 6 + ["other", "status", "plain", "ping", "pong"])
        size = rng.choice([30, 31, 200, 5_000, 70_000])
        match kind:
            case "ours":
                wanted.append(i)
                stream += delivery(i, 7, size)
            case "other":
                stream += delivery(i, 8, size)
            case "status":
                stream += delivery(i, 7, size, reply=False)
            case "plain":
                stream += delivery(i, 7, size, headers=False)
            case _:
                stream += kind.upper().encode() + b"\r\n"
        others += kind != "ours"
    at = 0
    while at < len(stream):
        step = rng.choice([1, 3, 17, 1_000, 32_768, 200_000])
        await splitter.parse(stream[at : at + step])
        at += step
    assert [int(m.subject[2:]) for m in taken] == wanted
    for m, i in zip(taken, wanted, strict=True):
        assert m.reply == f"$JS.ACK.S.c.1.{i}.{i}.1000.0"
        assert m.headers == {"Nats-Msg-Id": str(i), "traceparent": f"t{i}"}
        assert (m.header(b"traceparent"), m.header(b"trace"), m.header(b"Nats-Msg-Id")) == (
            f"t{i}",
            "",
            str(i),
        )
        assert m.data.startswith(b"HMSG x 7 y 1 2\r\nPING\r\n%d" % i)
    assert len(client.seen) == others


async def test_a_reset_forgets_what_was_half_there() -> None:
    client = Client()
    taken: list[Pulled] = []
    splitter = Splitter.of(client)  # type: ignore[arg-type]
    splitter.hand(7, taken.append)
    await splitter.parse(delivery(1, 7, 100)[:60])
    splitter.reset()
    await splitter.parse(delivery(2, 7, 100) + b"PING\r\n")
    assert [m.subject for m in taken] == ["s.2"]
    assert client.seen == [("ping",)]
    splitter.forget(7)
    await splitter.parse(delivery(3, 7, 100))
    assert (len(taken), len(client.seen)) == (1, 2)


async def test_a_command_that_had_begun_before_is_finished_by_nats_py() -> None:
    client = Client()
    taken: list[Pulled] = []
    first = delivery(1, 8, 100)
    await client._ps.parse(first[:50])
    splitter = Splitter.of(client)  # type: ignore[arg-type]
    splitter.hand(7, taken.append)
    await splitter.parse(first[50:])
    await splitter.parse(delivery(2, 7, 100))
    assert (len(client.seen), [m.subject for m in taken]) == (1, ["s.2"])


async def test_nats_py_and_the_short_way_give_the_same(nats_config: NatsConfig) -> None:
    """Against a real server: what is delivered, its headers, its metadata; and a reconnection in between."""
    spec = streams.consumer("store-rollouts")
    async with Broker.connect(nats_config) as broker:
        for seq in range(300):
            await broker.publish(exchange(seq=seq), {"traceparent": f"tp{seq}"})
        await broker.js.publish("rollout.exchange.p.t1", b"without headers")
        async with broker.consume("telemetry-rollouts") as _, pulling(broker.client, spec, 100) as puller:
            got: list[Pulled] = []
            with anyio.fail_after(20):
                while len(got) < 301:
                    got += await puller.take(64, 1.0)
            for seq, pulled in enumerate(got[:300]):
                stored = await broker.js.get_msg("ROLLOUTS", seq + 1)
                message = pulled.message()
                assert (message.data, message.subject) == (stored.data, stored.subject)
                assert message.headers == stored.headers
                assert (message.metadata.sequence.stream, message.metadata.num_delivered) == (seq + 1, 1)
            assert (got[300].data, got[300].headers) == (b"without headers", {})
            await acknowledge(broker.client, [m.reply for m in got])
            with anyio.fail_after(10):
                while await broker.lag("store-rollouts"):
                    await anyio.sleep(0.02)


async def test_it_goes_on_after_the_server_died(
    start_nats: Callable[..., NatsServer],
) -> None:
    server = start_nats()
    spec = streams.consumer("store-rollouts")
    config = NatsConfig(url=server.url, publish_deadline_s=20)
    async with Broker.connect(config) as broker, pulling(broker.client, spec, 50) as puller:
        seen: set[str] = set()
        for life in range(3):
            for seq in range(120):
                await broker.publish(exchange(f"life{life}", seq))
            with anyio.fail_after(30):
                while len(seen) < 120 * (life + 1):
                    try:
                        some = await puller.take(64, 1.0)
                    except ConsumerGoneError:
                        continue  # the request died with the server; the next take makes another
                    seen |= {m.header(b"Nats-Msg-Id") for m in some}
                    await acknowledge(broker.client, [m.reply for m in some])
            server.kill()
            await anyio.to_thread.run_sync(server.start)
