"""The tests' inference server ends without a trace, or it would fail a later test."""

import asyncio
import gc
import socket

import pytest

from tests.rollout_gateway.fake_vllm import FakeVllm


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_comes_with_the_end_is_closed(turns: int) -> None:
    """What is left open is an error of this test: warnings are. `turns`: of the loop, between connection and end."""

    async def end() -> None:
        server = FakeVllm()
        await server.start()
        with socket.create_connection(("127.0.0.1", server.port)):
            for _ in range(turns):
                await asyncio.sleep(0)
            await server.stop()

    asyncio.run(end())
    gc.collect()
