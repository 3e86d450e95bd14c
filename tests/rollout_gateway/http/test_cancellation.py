"""A cancellation ends the block that it is entered around, and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from rollout_gateway.http.cancellation import Cancellation
from rollout_gateway.http.errors import ClientGoneError

pytestmark = pytest.mark.anyio


async def test_what_is_outside_of_the_block_is_not_cancelled() -> None:
    cancellation, entered, go_on = Cancellation(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        with cancellation:
            pass
        entered.set()
        await go_on.wait()
        with cancellation:
            raise AssertionError("entered after it was cancelled")

    task = asyncio.create_task(work())
    await entered.wait()
    cancellation.cancel(ClientGoneError())
    cancellation.cancel(ValueError())  # the first counts
    go_on.set()
    with pytest.raises(ClientGoneError):
        await task


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
