"""`gather` keeps the order of the items, limits the calls at once, and raises the first error as it is."""

import anyio
import pytest

from pipeline.concurrency.concurrently import concurrently


async def test_results_have_the_order_of_the_items_and_calls_are_limited() -> None:
    running, most = 0, 0
    last_may_end = anyio.Event()

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if number == 0:
            await last_may_end.wait()
        elif number == 5:
            last_may_end.set()
        running -= 1
        return number * 10

    with anyio.fail_after(60):
        assert await concurrently(work, range(6), limit=2) == [0, 10, 20, 30, 40, 50]
    assert most == 2
    assert await concurrently(work, []) == []


async def test_the_first_error_is_raised_as_it_is_and_ends_the_other_calls() -> None:
    cancelled = []

    async def work(number: int) -> None:
        if number:
            raise LookupError(number)
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(number)

    with anyio.fail_after(60), pytest.raises(LookupError, match="1"):
        await concurrently(work, [0, 1])
    assert cancelled == [0]
