"""Taking messages of a consumer."""

from types import SimpleNamespace
from typing import Any, cast

import anyio

from pipeline.log.fast_client import FastClient, Pulled
from pipeline.log.pulling import Puller


async def test_what_was_taken_is_back_if_the_caller_is_cancelled_before_it_has_it() -> None:
    asking = anyio.Event()

    async def publish(*_: Any, **__: Any) -> None:
        asking.set()
        await anyio.sleep_forever()

    client = SimpleNamespace(stats={"reconnects": 0}, is_connected=True, max_payload=1, publish=publish)
    puller = Puller(cast("FastClient", client), "S", "c", "inbox", 10)
    messages = [cast("Pulled", object()) for _ in range(3)]
    for message in messages:
        puller.on_delivery(message)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(puller.take, 2, 60.0)
        await asking.wait()
        tasks.cancel_scope.cancel()
    assert puller.take_nowait() == messages
