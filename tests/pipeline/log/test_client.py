"""A connection to a cluster whose servers come and go."""

from __future__ import annotations

import asyncio
import gc
import warnings

import anyio
import pytest

from pipeline.config import NatsConfig, load
from pipeline.log.broker import Broker, BrokerUnavailableError
from tests.conftest import NatsServer, free_port
from tests.pipeline.log.test_broker import exchange

pytestmark = pytest.mark.anyio


async def test_attempts_that_end_before_a_servers_first_word_leave_no_socket_open() -> None:
    attempts = 0

    async def drop(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

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


async def test_any_of_several_servers_will_do(nats_server: NatsServer) -> None:
    dead = f"nats://127.0.0.1:{free_port()}"
    for url in ((dead, nats_server.url), f"{dead}, {nats_server.url}"):
        async with Broker.connect(NatsConfig(url=url)) as broker:
            await broker.publish(exchange())
    with pytest.raises(BrokerUnavailableError, match=f"{dead},{dead}"), anyio.fail_after(20):
        async with Broker.connect(NatsConfig(url=(dead, dead), connect_timeout_s=0.5)):
            pass


def test_servers_are_a_list_or_one_text() -> None:
    for given in ("nats.url=nats://a:1,nats://b:2", 'nats.url=["nats://a:1", "nats://b:2"]'):
        config = load(None, [given]).nats
        assert config.servers == ("nats://a:1", "nats://b:2")
        assert config.address == "nats://a:1,nats://b:2"
    assert load(None, []).nats.servers == ()
