"""Calls between two processes, here both in one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollout_gateway.workers.rpc import Handler, RpcClosedError, RpcConnection

pytestmark = pytest.mark.anyio


async def echo(kind: str, content: bytes) -> bytes:
    return kind.encode() + b":" + content


@asynccontextmanager
async def connected(handler: Handler) -> AsyncIterator[tuple[RpcConnection, RpcConnection]]:
    ends = socket.socketpair()
    both = RpcConnection(ends[0], handler), RpcConnection(ends[1], handler)
    running = [asyncio.ensure_future(end.run()) for end in both]
    try:
        while any(end._writer is None for end in both):
            await asyncio.sleep(0)
        yield both
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_both_ends_call_at_once_and_get_their_own_replies() -> None:
    async with connected(echo) as (a, b):
        large = bytes(3_000_000)
        calls = [*(a.call("a", b"%d" % n) for n in range(20)), *(b.call("b", b"%d" % n) for n in range(20))]
        answers = await asyncio.gather(*calls, a.call("large", large))
        assert answers[:40] == [b"%b:%d" % (end, n) for end in (b"a", b"b") for n in range(20)]
        assert answers[40] == b"large:" + large


async def test_a_call_fails_at_once_when_the_other_process_has_ended() -> None:
    entered = asyncio.Event()

    async def silent(kind: str, content: bytes) -> bytes:
        entered.set()
        return await asyncio.get_running_loop().create_future()

    async with connected(silent) as (a, b):
        waiting = asyncio.ensure_future(a.call("anything"))
        await entered.wait()
        assert b._writer is not None
        b._writer.close()
        with pytest.raises(RpcClosedError):
            await waiting
        with pytest.raises(RpcClosedError):
            await a.call("more")
