"""The short ways beside nats-py, against a real NATS server and with bytes in any portions, and what of nats-py they
rely on."""

import asyncio
import gc
import importlib.metadata
import random
import signal
import tomllib
import warnings
from pathlib import Path
from typing import Any

import anyio
import nats.errors
import nats.js.errors
import nats.protocol.parser
import psutil
import pytest

from pipeline.config import NatsConfig
from pipeline.log.broker import Broker, BrokerUnavailableError
from pipeline.log.fast_client import FastClient, Pulled
from tests.conftest import NatsServer
from tests.kits.events import exchange
from tests.kits.waiting import until_true

# -- nats-py -------------------------------------------------------------------------------------------------------


def test_nats_py_is_held_to_the_version_whose_private_names_are_known() -> None:
    """After a new minor version: read its client, parser and transport against this module, then move both bounds."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    assert {r for r in wanted if r.startswith("nats-py")} == {"nats-py>=2.16,<2.17"}
    assert importlib.metadata.version("nats-py").startswith("2.16.")


# -- publishing ----------------------------------------------------------------------------------------------------


async def test_many_at_once_are_all_acknowledged_each_with_its_own_number(broker: Broker) -> None:
    client, seqs = broker.client, {}

    async def one(number: int) -> None:
        payload = b"%d" % number
        ack = await client.publish_acked("rollout.opened.p.t", payload, {"Nats-Msg-Id": str(number)}, 60)
        assert (ack.stream, ack.duplicate) == ("ROLLOUTS", False)
        seqs[ack.seq] = payload

    async with anyio.create_task_group() as tg:
        for number in range(500):
            tg.start_soon(one, number)
    assert len(seqs) == 500
    for seq in list(seqs)[::50]:
        assert (await broker.js.get_msg("ROLLOUTS", seq)).data == seqs[seq]
    again = await client.publish_acked("rollout.opened.p.t", b"0", {"Nats-Msg-Id": "0"}, 60)
    assert again.duplicate
    assert not client._waiting


async def test_the_first_message_of_a_connection_is_acknowledged(nats_config: NatsConfig) -> None:
    """The subscription for acknowledgements used to be overtaken by the first message."""
    async with Broker.connect(nats_config):
        pass
    for number in range(20):
        async with Broker.connect(nats_config, provision=False) as broker:
            ack = await broker.client.publish_acked("rollout.opened.p.t", b"", {"Nats-Msg-Id": str(number)}, 60)
            assert ack.stream == "ROLLOUTS"


async def test_what_the_server_refuses_raises_as_with_nats_py(broker: Broker) -> None:
    headers = {"Nats-Expected-Last-Subject-Sequence": "7"}
    with pytest.raises(nats.js.errors.APIError) as ours:
        await broker.client.publish_acked("rollout.opened.p.t", b"", headers, 60)
    with pytest.raises(nats.js.errors.APIError) as theirs:
        await broker.js.publish("rollout.opened.p.t", b"", headers=headers)
    assert (ours.value.code, ours.value.err_code) == (theirs.value.code, theirs.value.err_code)
    with pytest.raises(nats.js.errors.NoStreamResponseError):
        await broker.client.publish_acked("no.stream.listens", b"", {}, 60)


async def test_headers_arrive_as_sent_and_can_hold_no_further_lines(broker: Broker) -> None:
    headers = {"traceparent": "00-u", "Reason": "first\r\nNats-Msg-Id: forged"}
    ack = await broker.client.publish_acked("rollout.opened.p.t", b"\r\nMSG x", headers, 60)
    found = await broker.js.get_msg("ROLLOUTS", ack.seq)
    assert found.headers == {"traceparent": "00-u", "Reason": "first Nats-Msg-Id: forged"}
    assert found.data == b"\r\nMSG x"


async def test_a_message_nobody_acknowledges_is_given_up(broker: Broker) -> None:
    sub = await broker.client.subscribe("deaf")  # else the server says that nobody listens
    await broker.client.flush()
    with anyio.fail_after(60), pytest.raises(nats.errors.TimeoutError):
        await broker.client.publish_acked("deaf", b"", {}, 0.01)
    assert not broker.client._waiting
    await sub.unsubscribe()


async def test_what_is_sent_while_the_server_is_away_arrives_once(nats_server: NatsServer, broker: Broker) -> None:
    await broker.client.publish_acked("rollout.opened.p.t", b"0", {}, 60)
    nats_server.kill()
    async with anyio.create_task_group() as tg:
        tg.start_soon(broker._publish_until_acked, "rollout.opened.p.t", b"1", {"Nats-Msg-Id": "one"})
        tg.start_soon(broker._publish_until_acked, "rollout.opened.p.t", b"2", {"Nats-Msg-Id": "two"})
        await anyio.to_thread.run_sync(nats_server.start)
    info = await broker.stream_info("ROLLOUTS")
    assert info.state.messages == 3


# -- pulled messages -----------------------------------------------------------------------------------------------


class Listener(FastClient):
    """A client without a connection that keeps what nats-py's parser gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.acks: list[tuple[bytes, bytes]] = []
        self.ack_prefix = b"MSG _INBOX.x."

    def resolve_ack(self, token: bytes, answer: bytes) -> None:
        self.acks.append((token, answer))

    def pull(self, sid: int) -> list[Pulled]:
        taken: list[Pulled] = []
        self._ps.handlers[b"%d" % sid] = taken.append
        return taken

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
    client = Listener()
    taken, parser = client.pull(7), client._ps
    wanted, bare, acks, others, stream = [], set[int](), list[tuple[bytes, bytes]](), 0, b""
    for i in range(200):
        kind = rng.choice(["ours"] * 6 + ["ack"] * 3 + ["other", "status", "plain", "ping", "pong"])
        size = rng.choice([30, 31, 200, 5_000, 70_000])
        match kind:
            case "ours":
                wanted.append(i)
                stream += delivery(i, 7, size)
            case "ack":
                acks.append((b"%x" % i, b"\r\nMSG _INBOX.x.1 2 3\r\n"[: rng.randint(0, 22)]))
                stream += b"MSG _INBOX.x.%x 1 %d\r\n%b\r\n" % (i, len(acks[-1][1]), acks[-1][1])
            case "other":
                stream += delivery(i, 8, size)
            case "status":
                stream += delivery(i, 7, size, reply=False)
            case "plain":
                wanted.append(i)
                bare.add(i)
                stream += delivery(i, 7, size, headers=False)
            case _:
                stream += kind.upper().encode() + b"\r\n"
        others += kind not in ("ours", "plain", "ack")
    at = 0
    while at < len(stream):
        step = rng.choice([1, 3, 17, 1_000, 32_768, 200_000])
        await parser.parse(stream[at : at + step])
        at += step
    assert client.acks == acks
    assert [int(m.subject[2:]) for m in taken] == wanted
    for m, i in zip(taken, wanted, strict=True):
        assert m.reply == f"$JS.ACK.S.c.1.{i}.{i}.1000.0"
        assert m.data.startswith(b"HMSG x 7 y 1 2\r\nPING\r\n%d" % i)
        if i in bare:
            assert m.headers == {}
            continue
        assert m.headers == {"Nats-Msg-Id": str(i), "traceparent": f"t{i}"}
        assert (m.header(b"traceparent"), m.header(b"trace"), m.header(b"Nats-Msg-Id")) == (f"t{i}", "", str(i))
    assert len(client.seen) == others


async def test_a_reset_forgets_what_was_half_there() -> None:
    client = Listener()
    taken, parser = client.pull(7), client._ps
    await parser.parse(delivery(1, 7, 100)[:60])
    parser.reset()
    await parser.parse(delivery(2, 7, 100) + b"PING\r\n")
    assert [m.subject for m in taken] == ["s.2"]
    assert client.seen == [("ping",)]
    parser.handlers.clear()
    await parser.parse(delivery(3, 7, 100))
    assert (len(taken), len(client.seen)) == (1, 2)


# -- connections ---------------------------------------------------------------------------------------------------


async def test_attempts_that_end_before_a_servers_first_word_leave_no_socket_open() -> None:
    attempts = 0

    async def drop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()  # what other tests left
    server = await asyncio.start_server(drop, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        while attempts < 3:
            with pytest.raises(BrokerUnavailableError):
                async with Broker.connect(NatsConfig(url=f"nats://127.0.0.1:{port}", connect_timeout_s=1.5)):
                    pass
        server.close()
        await server.wait_closed()
        await anyio.wait_all_tasks_blocked()
        gc.collect()
    assert [str(w.message) for w in seen if issubclass(w.category, ResourceWarning)] == []


async def test_a_late_answer_to_a_ping_that_was_given_up_does_not_end_the_reading(
    broker: Broker, nats_server: NatsServer
) -> None:
    """The fault that was: nats-py's reading task ended with an error, and the connection stayed deaf for minutes."""
    assert nats_server.process is not None
    nats_server.process.send_signal(signal.SIGSTOP)
    try:
        process = psutil.Process(nats_server.process.pid)
        await until_true(lambda: process.status() == psutil.STATUS_STOPPED)  # its threads may stop later
        with pytest.raises(nats.errors.FlushTimeoutError):
            await broker.client.flush(timeout=1)
    finally:
        nats_server.process.send_signal(signal.SIGCONT)
    await broker.publish(exchange())
    assert not broker.client._reading_task.done()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})])
async def test_requests_at_the_moment_at_which_the_connection_breaks_are_repeated(broker: Broker) -> None:
    """The fault that was: uvloop's transport raised a RuntimeError, which nobody expected, and the gateway answered an
    agent with "internal error"."""

    async def read_after(waits: int) -> None:
        for _ in range(waits):
            await asyncio.sleep(0)
        await broker.leader_get("ROLLOUTS", {"seq": 1})

    async with anyio.create_task_group() as tg:
        for request in range(36):
            tg.start_soon(read_after, request // 3)
        broker.client._transport._io_writer.transport.abort()
