"""Questions and answers between two processes, here both in one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollout_gateway.workers.link import Answer, Link, LinkLostError

pytestmark = pytest.mark.anyio


async def echo(kind: str, content: bytes) -> bytes:
    return kind.encode() + b":" + content


@asynccontextmanager
async def linked(answer: Answer) -> AsyncIterator[tuple[Link, Link]]:
    ends = socket.socketpair()
    links = Link(ends[0], answer), Link(ends[1], answer)
    running = [asyncio.ensure_future(link.run()) for link in links]
    try:
        while any(link._writer is None for link in links):
            await asyncio.sleep(0)
        yield links
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_both_ends_ask_at_once_and_get_their_own_answers() -> None:
    async with linked(echo) as (a, b):
        large = bytes(3_000_000)
        asks = [*(a.ask("a", b"%d" % n) for n in range(20)), *(b.ask("b", b"%d" % n) for n in range(20))]
        answers = await asyncio.gather(*asks, a.ask("large", large))
        assert answers[:40] == [b"%b:%d" % (end, n) for end in (b"a", b"b") for n in range(20)]
        assert answers[40] == b"large:" + large


async def test_a_question_whose_other_end_is_gone_fails_at_once() -> None:
    entered = asyncio.Event()

    async def silent(kind: str, content: bytes) -> bytes:
        entered.set()
        return await asyncio.get_running_loop().create_future()

    async with linked(silent) as (a, b):
        waiting = asyncio.ensure_future(a.ask("anything"))
        await entered.wait()
        assert b._writer is not None
        b._writer.close()
        with pytest.raises(LinkLostError):
            await waiting
        with pytest.raises(LinkLostError):
            await a.ask("more")
