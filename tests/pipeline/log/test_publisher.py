"""The fast way to publish, against a real NATS server, and where it leaves the way to nats-py."""

from __future__ import annotations

from typing import Any

import anyio
import nats.errors
import nats.js.errors
import pytest
from nats.aio.client import Client

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker
from pipeline.log.publisher import Publisher
from tests.conftest import NatsServer

pytestmark = pytest.mark.anyio


async def test_many_at_once_are_all_acknowledged_each_with_its_own_number(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        publisher, seqs = broker._publisher, {}

        async def one(number: int) -> None:
            payload = b"%d" % number
            ack = await publisher.publish("rollout.opened.p.t", payload, {"Nats-Msg-Id": str(number)}, 5)
            assert (ack.stream, ack.duplicate) == ("ROLLOUTS", False)
            seqs[ack.seq] = payload

        async with anyio.create_task_group() as tg:
            for number in range(500):
                tg.start_soon(one, number)
        assert len(seqs) == 500
        for seq in list(seqs)[::50]:
            assert (await broker.js.get_msg("ROLLOUTS", seq)).data == seqs[seq]
        again = await publisher.publish("rollout.opened.p.t", b"0", {"Nats-Msg-Id": "0"}, 5)
        assert again.duplicate
        assert not publisher._waiting


async def test_the_first_message_of_a_connection_is_acknowledged(nats_config: NatsConfig) -> None:
    """The subscription for acknowledgements used to be overtaken by the first message."""
    async with Broker.connect(nats_config):
        pass
    for number in range(20):
        async with Broker.connect(nats_config, provision=False) as broker:
            ack = await broker._publisher.publish("rollout.opened.p.t", b"", {"Nats-Msg-Id": str(number)}, 5)
            assert ack.stream == "ROLLOUTS"


async def test_what_the_server_refuses_raises_as_with_nats_py(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        headers = {"Nats-Expected-Last-Subject-Sequence": "7"}
        with pytest.raises(nats.js.errors.APIError) as ours:
            await broker._publisher.publish("rollout.opened.p.t", b"", headers, 5)
        with pytest.raises(nats.js.errors.APIError) as theirs:
            await broker.js.publish("rollout.opened.p.t", b"", headers=headers)
        assert (ours.value.code, ours.value.err_code) == (theirs.value.code, theirs.value.err_code)
        with pytest.raises(nats.js.errors.NoStreamResponseError):
            await broker._publisher.publish("no.stream.listens", b"", {}, 5)


async def test_headers_arrive_as_sent_and_can_hold_no_further_lines(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        headers = {"traceparent": "00-u", "Reason": "first\r\nNats-Msg-Id: forged"}
        ack = await broker._publisher.publish("rollout.opened.p.t", b"\r\nMSG x", headers, 5)
        found = await broker.js.get_msg("ROLLOUTS", ack.seq)
        assert found.headers == {"traceparent": "00-u", "Reason": "first Nats-Msg-Id: forged"}
        assert found.data == b"\r\nMSG x"


async def test_acknowledgements_in_any_portions(nats_config: NatsConfig) -> None:
    client = Client()
    publisher = Publisher(client)
    await client.connect(nats_config.url)
    await publisher.start()
    parser, loop = client._ps, publisher._loop
    sid = max(client._subs)
    messages = (
        b"".join(
            b"MSG %b%x %d %d\r\n%b\r\n" % (publisher._inbox, number, sid, len(answer), answer)
            for number, answer in enumerate([b"one", b"", b"three\r\nMSG", b"four"])
        )
        + b"PING\r\n"
    )
    for size in range(1, len(messages) + 1):
        futures = [loop.create_future() for _ in range(4)]
        publisher._waiting.update({b"%x" % i: (future, 1e18) for i, future in enumerate(futures)})
        for at in range(0, len(messages), size):
            await parser.parse(messages[at : at + size])
        assert [await f for f in futures] == [b"one", b"", b"three\r\nMSG", b"four"]
        assert not parser.buf
    publisher.close()
    await client.close()


async def test_acknowledgements_are_taken_before_the_parser_sees_them(
    nats_server: NatsServer, nats_config: NatsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Broker.connect(nats_config) as broker:
        publisher, parsed = broker._publisher, bytearray()
        parser = broker.client._ps
        parse = type(parser).parse

        async def noted(self: Any, data: bytes = b"") -> None:
            parsed.extend(data)
            await parse(self, data)

        monkeypatch.setattr(type(parser), "parse", noted)
        for _ in range(2):
            for number in range(20):
                await publisher.publish("rollout.opened.p.t", b"%d" % number, {}, 5)
            assert publisher._mark not in parsed
            nats_server.kill()
            await anyio.to_thread.run_sync(nats_server.start)
            # The new connection is listened to from the first thing on that its server says.
            await broker._publish_until_acked("rollout.opened.p.t", b"again", {"Nats-Msg-Id": "again"})
            parsed.clear()


async def test_a_message_nobody_acknowledges_is_given_up(nats_config: NatsConfig) -> None:
    async with Broker.connect(nats_config) as broker:
        sub = await broker.client.subscribe("deaf")  # else the server says that nobody listens
        await broker.client.flush()
        with anyio.fail_after(5), pytest.raises(nats.errors.TimeoutError):
            await broker._publisher.publish("deaf", b"", {}, 0.01)
        assert not broker._publisher._waiting
        await sub.unsubscribe()


async def test_what_is_sent_while_the_server_is_away_arrives_once(
    nats_server: NatsServer, nats_config: NatsConfig
) -> None:
    async with Broker.connect(nats_config) as broker:
        await broker._publisher.publish("rollout.opened.p.t", b"0", {}, 5)
        nats_server.kill()
        async with anyio.create_task_group() as tg:
            tg.start_soon(broker._publish_until_acked, "rollout.opened.p.t", b"1", {"Nats-Msg-Id": "one"})
            tg.start_soon(broker._publish_until_acked, "rollout.opened.p.t", b"2", {"Nats-Msg-Id": "two"})
            await anyio.to_thread.run_sync(nats_server.start)
        info = await broker.js.stream_info("ROLLOUTS")
        assert info.state.messages == 3
