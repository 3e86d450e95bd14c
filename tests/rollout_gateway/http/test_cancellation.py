"""A cancellation ends the block that it is entered around, and nothing else."""

import asyncio

import pytest

from rollout_gateway.http.cancellation import Cancellation
from rollout_gateway.http.errors import ClientGoneError


async def test_a_task_that_is_cancelled_by_others_too_stays_cancelled() -> None:
    cancellation, entered = Cancellation(), asyncio.Event()

    async def work() -> None:
        with cancellation:
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await entered.wait()
    cancellation.cancel(ClientGoneError())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
