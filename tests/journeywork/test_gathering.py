"""Many rollouts at once, over a stub of the gateway's control API."""

import asyncio
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio.lowlevel
import anyio.to_thread
import httpx
import pytest

from journeywork import AsyncJourneywork, GatewayUnavailableError, Journeywork, JourneyworkError, TooManyExceptionsError
from journeywork.gathering import TaskGroup
from journeywork.trajectory import Trajectory
from tests.kits.stub_gateway import StubGateway


@pytest.fixture
async def stub() -> AsyncIterator[StubGateway]:
    found = StubGateway()
    async with found.serving():
        yield found


async def gather(
    stub: StubGateway, tasks: Any, rollout: Any, *, wait_s: float = 60.0, **options: Any
) -> list[TaskGroup[Any]]:
    async with AsyncJourneywork(stub.url, wait_s=wait_s) as client:
        return await client.gather("m", tasks, rollout, progress=False, **options)


def assert_without_result(stub: StubGateway) -> None:
    """All that was opened was completed without a result."""
    assert stub.opened.keys() == stub.completed.keys()
    assert {body["outcome"] for body in stub.completed.values()} == {"no_result"}


@pytest.mark.slow
async def test_many_runs_keep_64_in_flight_and_outlive_a_restart() -> None:
    stub, running, most, halfway, back = StubGateway(), 0, 0, anyio.Event(), anyio.Event()
    finished = 0

    async def rollout(run: Trajectory, task: int) -> float:
        nonlocal running, most, finished
        running += 1
        most = max(most, running)
        if most >= 64:
            full.set()
        with anyio.move_on_after(60):
            await full.wait()  # nobody goes on before 64 are in flight
        running -= 1
        finished += 1
        if finished == 100:
            halfway.set()
            await back.wait()
        return float(task)

    full = anyio.Event()
    async with AsyncJourneywork(stub.url) as client, anyio.create_task_group() as tg:

        async def serve_twice() -> None:
            async with stub.serving():
                await halfway.wait()
            async with stub.serving():
                back.set()
                await ended.wait()

        ended = anyio.Event()
        tg.start_soon(serve_twice)
        groups = await client.gather("m", range(32), rollout, group_size=8, concurrency=64, progress=False)
        ended.set()
    assert most == 64
    assert len(groups) == 32
    assert [g.rewards for g in groups] == [[float(n)] * 8 for n in range(32)]
    assert not any(g.exceptions for g in groups)
    assert len(stub.opened) == len(stub.completed) == 256
    assert all(body["outcome"] == "scored" for body in stub.completed.values())
    assert sorted(b["attempt"] for b in stub.opened.values() if b["group"] == groups[3].name) == list(range(1, 9))


@pytest.mark.parametrize(
    ("allowed", "said"), [(0.0, "allows 0"), (0.02, "allows 2"), (3, "allows 3"), (0.29, "allows 29")]
)
async def test_too_many_exceptions_end_it_and_complete_what_was_open(
    stub: StubGateway, allowed: float, said: str
) -> None:
    async def rollout(run: Trajectory, task: int) -> float:
        if task % 2:
            raise ZeroDivisionError("no luck")
        await anyio.sleep_forever()
        return 1.0

    with pytest.raises(TooManyExceptionsError, match=said) as error:
        await gather(stub, range(100), rollout, group_size=1, concurrency=80, max_exceptions=allowed)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert_without_result(stub)


async def test_an_opening_that_is_cancelled_does_not_wait_for_the_gateway_again() -> None:
    """Where no gateway answered, the first attempts waited `wait_s` and cancelled the others, which waited as long
    again to complete runs that were never opened."""
    sent: list[str] = []
    tried = anyio.Event()

    class Unreachable(AsyncJourneywork):
        async def _send(self, method: str, path: str, body: Any, timeout_s: float) -> httpx.Response:
            sent.append(path)
            tried.set()
            await anyio.lowlevel.checkpoint()
            raise httpx.ConnectError("refused")

    async with Unreachable("http://127.0.0.1:9", wait_s=2) as client, anyio.create_task_group() as opening:
        opening.start_soon(client.trajectory("m", id="t").__aenter__)
        await tried.wait()
        opening.cancel_scope.cancel()
    assert sent.count("/v1/trajectories/t/complete") == 1


async def test_plain_functions_run_in_threads(stub: StubGateway) -> None:
    names: set[str] = set()

    def rollout(run: Trajectory, task: str) -> None:
        names.add(threading.current_thread().name)
        run.reward, run.metrics["length"] = 0.5, len(task)

    def play() -> list[float]:
        with Journeywork(stub.url) as client:
            groups = client.gather("m", ["a", "bc"], rollout, group_size=3, describe=str.upper, progress=False)
        return [r for g in groups for r in g.rewards]

    assert await anyio.to_thread.run_sync(play) == [0.5] * 6
    assert threading.main_thread().name not in names
    assert {b["task"] for b in stub.opened.values()} == {"A", "BC"}
    assert {b["metrics"]["length"] for b in stub.completed.values()} == {1, 2}


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"group_size": 0}, ValueError, "group_size and concurrency must be at least 1, not 0 and 64"),
        ({"group_size": 2.5}, TypeError, "must be whole numbers"),
        ({"max_exceptions": -1}, ValueError, "max_exceptions must be a number of at least 0, not -1"),
        ({"max_exceptions": float("nan")}, ValueError, "max_exceptions must be a number of at least 0, not nan"),
        # Two tasks of one name would be compared with each other as one group.
        ({"name": lambda task: "same"}, ValueError, "`name` returns 'same' for several tasks"),
        ({"rollout": None}, TypeError, "rollout must be a function of a trajectory and a task, not None"),
    ],
)
async def test_what_can_t_be_gathered_is_said_so(
    stub: StubGateway, wrong: dict[str, Any], kind: type[Exception], said: str
) -> None:
    options: dict[str, Any] = {"tasks": [1, 2], "rollout": lambda run, task: 1.0}
    with pytest.raises(kind, match=said):
        await gather(stub, **{**options, **wrong})
    assert await gather(stub, **{**options, "tasks": []}) == []
    assert not stub.opened


@pytest.mark.parametrize("plain", [True, False])
async def test_a_rollout_that_is_cancelled_by_itself_is_a_failure_of_its_own(stub: StubGateway, plain: bool) -> None:
    async def awaits_what_is_cancelled(run: Trajectory, task: int) -> float:
        if task == 1:
            lost: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            lost.cancel()
            return await lost
        return 1.0

    def runs_it(run: Trajectory, task: int) -> float:
        return asyncio.run(awaits_what_is_cancelled(run, task))

    rollout: Any = runs_it if plain else awaits_what_is_cancelled
    groups = await gather(stub, range(3), rollout, group_size=2, max_exceptions=2)
    assert [g.rewards for g in groups] == [[1.0, 1.0], [], [1.0, 1.0]]
    assert [t.outcome for t in groups[1].trajectories] == ["no_result"] * 2
    assert {str(error).partition(":")[0] for error in groups[1].exceptions} == {"the rollout was cancelled"}


@pytest.mark.parametrize("natively", [True, False])
async def test_a_gathering_that_is_cancelled_ends_as_such(stub: StubGateway, natively: bool) -> None:
    playing = asyncio.Event()

    async def rollout(run: Trajectory, task: int) -> float:
        playing.set()
        await anyio.sleep_forever()
        return 1.0

    play = partial(gather, stub, [1], rollout, group_size=2)
    if natively:
        gathering = asyncio.create_task(play())
        await playing.wait()
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering
    else:
        async with anyio.create_task_group() as running:
            running.start_soon(play)
            await playing.wait()
            running.cancel_scope.cancel()
    assert_without_result(stub)


async def test_too_many_exceptions_do_not_wait_for_threads_and_leave_nothing_open(stub: StubGateway) -> None:
    release = threading.Event()

    def rollout(run: Trajectory, task: int) -> float:
        if task == 0:
            raise ZeroDivisionError("no luck")
        release.wait(60)
        return 1.0

    try:
        with pytest.raises(TooManyExceptionsError, match="max_exceptions allows 0"):
            await gather(stub, range(4), rollout, group_size=1, max_exceptions=0.1)
        assert_without_result(stub)
    finally:
        release.set()


async def test_an_agents_own_error_is_what_its_caller_sees(stub: StubGateway) -> None:
    async with AsyncJourneywork(stub.url, wait_s=0.1) as client:
        with pytest.raises(ZeroDivisionError) as seen:  # noqa: PT012
            async with client.trajectory("m") as run:
                stub.opened.clear()  # completing it is refused
                raise ZeroDivisionError
    assert "could not be completed" in seen.value.__notes__[0]
    assert run.outcome == "no_result"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, "{}"),
        (200, "[]"),
        (200, "null"),
        (400, '{"error": "bad"}'),
        (400, '["x"]'),
        (404, '{"detail": "Not Found"}'),
    ],
)
def test_json_of_another_server_is_named_as_such(status: int, body: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, content=body, headers={"content-type": "application/json"})

    with Journeywork("http://127.0.0.1:9") as client:
        client._core._blocking_http = httpx.Client(base_url=client.url, transport=httpx.MockTransport(answer))
        with pytest.raises(JourneyworkError, match="is this the gateway's URL") as seen:
            client.open("m")
        assert seen.value.code == ""


async def _ends(stub: StubGateway, blocking: bool, reward: Any, failure: type[BaseException]) -> Trajectory:
    """Run one trajectory that ends with `reward`, with either client. Returns it once `failure` was raised."""
    seen: list[Trajectory] = []

    def play() -> None:
        with Journeywork(stub.url, wait_s=0.1) as client, client.trajectory("m") as run:
            seen.append(run)
            run.reward = reward

    with pytest.raises(failure) as raised:  # noqa: PT012
        if blocking:
            await anyio.to_thread.run_sync(play)
        else:
            async with AsyncJourneywork(stub.url, wait_s=0.1) as client, client.trajectory("m") as run:
                seen.append(run)
                run.reward = reward
    assert not getattr(raised.value, "__notes__", [])
    return seen[0]


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_result_that_finds_no_gateway_is_not_replaced(stub: StubGateway, blocking: bool) -> None:
    stub.away = True
    run = await _ends(stub, blocking, 0.5, GatewayUnavailableError)
    assert stub.sent
    assert all(body["reward"] == 0.5 for body in stub.sent)
    stub.away = False
    async with AsyncJourneywork(stub.url) as client:  # as the docstring says
        await client.complete(run.id, **run.result())
    assert stub.completed[run.id]["reward"] == 0.5


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("reward", "failure"), [(1e9, JourneyworkError), (float("nan"), ValueError), ("good", TypeError)], ids=str
)
async def test_a_result_that_is_refused_or_is_no_number_is_no_result(
    stub: StubGateway, blocking: bool, reward: Any, failure: type[Exception]
) -> None:
    run = await _ends(stub, blocking, reward, failure)
    assert stub.completed[run.id] == {"outcome": "no_result"}
    assert run.outcome == "no_result"


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_run_that_somebody_else_completed_stays_as_it_is(stub: StubGateway, blocking: bool) -> None:
    stub.completed_by_others = {"outcome": "scored", "reward": 0.25}
    await _ends(stub, blocking, 0.5, JourneyworkError)
    assert len(stub.sent) == 1


async def test_a_reward_that_never_arrived_is_no_reward_of_its_group(stub: StubGateway) -> None:
    stub.away = True
    (group,) = await gather(stub, [1], lambda run, task: 1.0, wait_s=0.1, group_size=2, max_exceptions=2)
    assert group.rewards == group.scored == []
    assert [type(e) for e in group.exceptions] == [GatewayUnavailableError] * 2
    stub.away = False
    async with AsyncJourneywork(stub.url) as client:
        for run in group.trajectories:
            await client.complete(run.id, **run.result())
    assert [body["reward"] for body in stub.completed.values()] == [1.0, 1.0]
    assert {body["outcome"] for body in stub.completed.values()} == {"scored"}


async def test_an_empty_id_is_refused(stub: StubGateway) -> None:
    """Its path is that of the list of trajectories."""
    async with AsyncJourneywork(stub.url) as client:
        for request in (client.get, client.complete):
            with pytest.raises(ValueError, match="the id of the trajectory is empty"):
                await request("")
    with Journeywork(stub.url) as blocking, pytest.raises(ValueError, match="the id of the trajectory is empty"):
        await anyio.to_thread.run_sync(blocking.get, "")
