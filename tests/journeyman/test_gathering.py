"""Many rollouts at once, over a stub of the gateway's control API."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import anyio
import anyio.to_thread
import pytest

from journeyman import AsyncJourneyman, Journeyman, TooManyExceptionsError
from journeyman.trajectory import Trajectory
from tests.kits.stub_gateway import StubGateway

pytestmark = pytest.mark.anyio


@pytest.fixture
async def stub() -> AsyncIterator[StubGateway]:
    found = StubGateway()
    async with found.serving():
        yield found


async def test_a_thousand_runs_keep_64_in_flight_and_outlive_a_restart() -> None:
    stub, running, most, halfway, back = StubGateway(), 0, 0, anyio.Event(), anyio.Event()
    finished = 0

    async def rollout(run: Trajectory, task: int) -> float:
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        if most >= 64:
            full.set()
        with anyio.move_on_after(5):
            await full.wait()  # nobody goes on before 64 are in flight
        running -= 1
        finished += 1
        if finished == 500:
            halfway.set()
            await back.wait()
        return float(task)

    full = anyio.Event()
    async with AsyncJourneyman(stub.url) as client, anyio.create_task_group() as tg:

        async def serve_twice() -> None:
            async with stub.serving():
                await halfway.wait()
            async with stub.serving():
                back.set()
                await ended.wait()

        ended = anyio.Event()
        tg.start_soon(serve_twice)
        groups = await client.gather("m", range(125), rollout, group_size=8, concurrency=64, progress=False)
        ended.set()
    assert most == 64
    assert len(groups) == 125
    assert [g.rewards for g in groups] == [[float(n)] * 8 for n in range(125)]
    assert not any(g.exceptions for g in groups)
    assert len(stub.opened) == len(stub.completed) == 1000
    assert all(body["outcome"] == "scored" for body in stub.completed.values())
    assert sorted(b["attempt"] for b in stub.opened.values() if b["group"] == groups[3].name) == list(
        range(8)
    )


async def test_an_exception_is_kept_and_its_run_has_no_result(stub: StubGateway) -> None:
    async def rollout(run: Trajectory, task: int) -> float:
        if task == 2:
            raise ZeroDivisionError("no luck")
        return 1.0

    async with AsyncJourneyman(stub.url) as client:
        groups = await client.gather("m", range(4), rollout, group_size=2, max_exceptions=2, progress=False)
    assert [len(g.exceptions) for g in groups] == [0, 0, 2, 0]
    assert [g.rewards for g in groups] == [[1.0, 1.0], [1.0, 1.0], [], [1.0, 1.0]]
    assert all(t.outcome == "no_result" for t in groups[2].trajectories)
    lost = [stub.completed[t.id] for t in groups[2].trajectories]
    assert all(b["outcome"] == "no_result" and b["reward"] is None for b in lost)


@pytest.mark.parametrize(("allowed", "said"), [(0.0, "allows 0"), (0.02, r"allows 0\.02"), (3, "allows 3")])
async def test_too_many_exceptions_end_it_and_complete_what_was_open(
    stub: StubGateway, allowed: float, said: str
) -> None:
    async def rollout(run: Trajectory, task: int) -> float:
        if task % 2:
            raise ZeroDivisionError("no luck")
        await anyio.sleep_forever()
        return 1.0

    async with AsyncJourneyman(stub.url) as client:
        with pytest.raises(TooManyExceptionsError, match=said) as error:
            await client.gather(
                "m", range(100), rollout, group_size=1, concurrency=50, max_exceptions=allowed, progress=False
            )
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert stub.opened.keys() == stub.completed.keys()
    assert all(b["outcome"] == "no_result" for b in stub.completed.values())


async def test_plain_functions_run_in_threads(stub: StubGateway) -> None:
    names: set[str] = set()

    def rollout(run: Trajectory, task: str) -> None:
        names.add(threading.current_thread().name)
        run.reward, run.metrics["length"] = 0.5, len(task)

    def play() -> list[float]:
        with Journeyman(stub.url) as client:
            groups = client.gather(
                "m", ["a", "bc"], rollout, group_size=3, describe=str.upper, progress=False
            )
        return [r for g in groups for r in g.rewards]

    assert await anyio.to_thread.run_sync(play) == [0.5] * 6
    assert threading.main_thread().name not in names
    assert {b["task"] for b in stub.opened.values()} == {"A", "BC"}
    assert {b["metrics"]["length"] for b in stub.completed.values()} == {1, 2}


async def test_an_evaluation_is_held_out_and_pinned(stub: StubGateway) -> None:
    async def rollout(run: Trajectory, task: float) -> float | None:
        if task == 3.0:
            raise ZeroDivisionError
        return task + (1.0 if stub.opened[run.id]["pinned"] == "m@7" else 0.0)

    async with AsyncJourneyman(stub.url) as client:
        found = await client.compare(
            "m@0", "m@7", [0.0, 1.0, 3.0, 2.5], rollout, max_exceptions=2, progress=False
        )
    assert {b["split"] for b in stub.opened.values()} == {"val"}
    assert {b["model"] for b in stub.opened.values()} == {"m"}
    assert found.first.rewards == (0.0, 1.0, None, 2.5)
    assert (found.first.failed, found.second.failed) == (1, 1)
    assert (found.difference.mean, found.difference.low, found.difference.count) == (1.0, 1.0, 3)


async def test_what_can_t_be_gathered_is_said_so(stub: StubGateway) -> None:
    async def rollout(run: Trajectory, task: int) -> float:
        return 1.0

    async with AsyncJourneyman(stub.url) as client:
        with pytest.raises(ValueError, match="group_size and concurrency must be at least 1, not 0 and 64"):
            await client.gather("m", [1], rollout, group_size=0)
        assert await client.gather("m", [], rollout, progress=False) == []
