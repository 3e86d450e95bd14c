"""The loop over a gateway in memory: order, staleness, evaluations, tries and resume."""

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

import anyio
import pytest

from journeywork import AsyncJourneywork, Trajectory
from journeywork.looping import LoopOptions, LoopResult, loop
from journeywork.statistics import mean_of
from tests.kits.stub_gateway import StubGateway
from tests.kits.waiting import until_true

SCENARIOS = ["a", "b", "c", "d", "e"]
SIZE = 4


async def play(run: Trajectory, task: str) -> float:
    return float(ord(task) % 2)


async def run(
    stub: StubGateway,
    rollout: Any = play,
    scenarios: Any = SCENARIOS,
    model: str = "m",
    client: AsyncJourneywork | None = None,
    **options: Any,
) -> LoopResult:
    """A loop named `night`, one epoch long, on a gateway whose trainer is far away."""
    chosen = {
        "name": "night",
        "steps": 100,
        "groups_per_step": 1000,
        "group_size": SIZE,
        "concurrency": 6,
        "epochs": 1,
        "describe": str,
        "poll_s": 0.03,
        **options,
    }
    async with client or stub.client() as client:
        return await loop(client, model, scenarios, rollout, LoopOptions(**chosen))


@dataclass
class PolledGateway(StubGateway):
    asked: int = 0
    """How often it was asked about a group."""
    unopened: set[str] = field(default_factory=set)
    """Groups that it was asked about before a run of theirs was opened: an agent's key is answered 404."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path.startswith("/v1/groups/"):
            self.asked += 1
            group = unquote(path.partition("?")[0].removeprefix("/v1/groups/"))
            if group not in {opened["group"] for opened in self.opened.values()}:
                self.unopened.add(group)
        return super().answer(method, path, body)


def played(stub: StubGateway, split: str = "train") -> Counter[str]:
    """How many attempts at each task have a result."""
    return Counter(
        stub.opened[name]["task"]
        for name, result in stub.completed.items()
        if result.get("outcome") != "no_result" and stub.opened[name]["split"] == split
    )


@asynccontextmanager
async def trainer(stub: StubGateway, groups_per_step: int, last: int, least: int = SIZE) -> Any:
    """Trains groups of at least so many completed attempts, as soon as a batch is complete, up to the step `last`."""

    async def train() -> None:
        while True:
            sizes = Counter(stub.opened[name]["group"] for name in stub.completed)
            whole = [g for g in sizes if sizes[g] >= least and g not in stub.decided]
            if len(whole) >= groups_per_step and stub.step < last:
                stub.step += 1
                for group in whole[:groups_per_step]:
                    stub.decided[group] = {"status": "trained", "version": f"m@{stub.step}"}
            await anyio.sleep(0.02)

    async with anyio.create_task_group() as running:
        running.start_soon(train)
        yield
        running.cancel_scope.cancel()


async def test_every_scenario_is_played_in_order_once_per_epoch() -> None:
    stub = StubGateway()
    result = await run(stub, epochs=2)
    assert played(stub) == dict.fromkeys(SCENARIOS, 2 * SIZE)
    assert (result.played, result.resumed, result.incomplete) == (10 * SIZE, 0, [])
    groups = list(dict.fromkeys(o["group"] for o in stub.opened.values()))
    assert groups == [f"night-{n}" for n in range(10)]
    assert stub.most_open <= 6
    assert {o["group_size"] for o in stub.opened.values()} == {SIZE}


async def test_a_loop_goes_on_where_the_log_says() -> None:
    """Some attempts are complete, some lost their process, and some were never opened."""
    stub = StubGateway()
    await run(stub, scenarios=SCENARIOS[:3])
    del stub.completed["night-1-2"]  # open: its process died
    for name in ("night-2-0", "night-2-3"):  # never opened
        del stub.completed[name], stub.opened[name]
    result = await run(stub)
    again = await run(stub)
    assert played(stub) == dict.fromkeys(SCENARIOS, SIZE)
    assert (result.resumed, result.played) == (9, 11)
    assert stub.completed["night-1-2"] == {"outcome": "no_result"}
    assert {n for n, o in stub.opened.items() if "." in o["group"]} == {"night-1.1-0", "night-2.1-0", "night-2.1-1"}
    assert (again.resumed, again.played) == (20, 0)


async def test_no_group_is_older_than_the_staleness_allows() -> None:
    for max_staleness in (0, 2):
        stub = StubGateway(step=0)
        async with trainer(stub, groups_per_step=2, last=8):
            result = await run(stub, steps=8, groups_per_step=2, max_staleness=max_staleness, epochs=None)
        assert result.step == 8
        assert len(result.staleness) >= 10
        assert max(result.staleness) <= max_staleness


async def test_no_group_is_asked_about_before_its_first_run_is_opened() -> None:
    stub = PolledGateway(step=0)
    async with trainer(stub, groups_per_step=2, last=3):
        result = await run(stub, steps=3, groups_per_step=2, max_staleness=1, epochs=None, concurrency=1)
    assert (result.step, stub.unopened) == (3, set())
    assert stub.asked


async def test_an_attempt_that_hangs_holds_up_no_group() -> None:
    """The judge closes its group after a while without it, and the trainer decides about the rest."""

    async def hang_once(run: Trajectory, task: str) -> float:
        if run.id == "night-0-0":
            await anyio.sleep_forever()
        return await play(run, task)

    stub = StubGateway(step=0)
    options = {"rollout": hang_once, "steps": 4, "groups_per_step": 2, "max_staleness": 0, "epochs": None}
    async with trainer(stub, groups_per_step=2, last=3, least=SIZE - 1), anyio.create_task_group() as playing:
        playing.start_soon(partial(run, stub, **options))
        await until_true(lambda: stub.step >= 3)
        playing.cancel_scope.cancel()


async def test_groups_that_wait_since_before_a_restart_are_ahead_of_new_ones() -> None:
    stub = PolledGateway(step=0)  # and no trainer
    for allowed in (2, 2, 3):
        asked = stub.asked
        async with anyio.create_task_group() as playing:
            options = {"steps": 8, "max_staleness": 0, "groups_per_step": allowed, "epochs": None}
            playing.start_soon(partial(run, stub, **options))
            with anyio.fail_after(60):
                # Groups are asked about while they hold up others: it waits for the trainer by then.
                while len(stub.completed) < allowed * SIZE or stub.asked < asked + 5 * allowed:
                    await anyio.sleep(0.01)
            playing.cancel_scope.cancel()
        assert len({o["group"] for o in stub.opened.values()}) == allowed
    async with trainer(stub, groups_per_step=3, last=2):
        result = await run(stub, steps=2, max_staleness=0, groups_per_step=3, epochs=None)
    assert (result.step, result.staleness) == (2, [0, 0, 0])


async def test_versions_are_evaluated_every_few_steps_and_not_again_after_a_restart() -> None:
    stub = StubGateway(step=0)
    options: dict[str, Any] = {"steps": 4, "groups_per_step": 2, "max_staleness": 1, "epochs": None}
    held_out: dict[str, Any] = {"evaluate_every": 2, "evaluation": ["x", "y", "z"]}
    async with trainer(stub, groups_per_step=2, last=4):
        result = await run(stub, **options, **held_out)
        opened = set(stub.opened)
        again = await run(stub, **options, **held_out)
    assert set(result.evaluations) == {0, 2, 4}
    assert result.evaluations[4] == mean_of([1.0, 0.0, 0.0])
    assert result.evaluations[4].count == 3
    pinned = {o["pinned"] for o in stub.opened.values() if o["split"] == "val"}
    assert pinned == {f"m@{step}" for step in result.evaluations}
    assert set(stub.opened) == opened
    assert again.evaluations == {4: result.evaluations[4]}


async def test_steps_that_are_trained_during_an_evaluation_are_evaluated_too() -> None:
    """Only the newest version was evaluated, so the curve had holes wherever steps were fast."""
    stub = StubGateway(step=0)

    async def train_meanwhile(run: Trajectory, task: str) -> float:
        if task == "x":
            stub.step = 7
        return await play(run, task)

    held_out: dict[str, Any] = {"evaluate_every": 2, "evaluation": ["x", "y"]}
    result = await run(stub, train_meanwhile, steps=7, groups_per_step=2, epochs=None, **held_out)
    assert list(result.evaluations) == [0, 2, 4, 6]
    pinned = Counter(o["pinned"] for o in stub.opened.values() if o["split"] == "val")
    assert pinned == {f"m@{step}": 2 for step in (0, 2, 4, 6)}


async def test_a_version_that_is_gone_is_not_evaluated_and_the_loop_goes_on() -> None:
    stub = StubGateway(step=3, retired={"m@2"})
    result = await run(stub, evaluate_every=2, evaluation=["x", "y"])
    assert (result.not_evaluated, result.evaluations) == ([2], {})
    assert played(stub) == dict.fromkeys(SCENARIOS, SIZE)


async def test_an_attempt_that_raises_is_played_again() -> None:
    raised = Counter[str]()

    async def sometimes(run: Trajectory, task: str) -> float:
        if task == "b" and raised[task] < 2:
            raised[task] += 1
            raise RuntimeError("the tool is away")
        if task == "d":
            raise ValueError("never works")
        return 1.0

    stub = StubGateway()
    result = await run(stub, sometimes, tries=2)
    assert played(stub) == {"a": SIZE, "b": SIZE, "c": SIZE, "e": SIZE}
    assert result.incomplete == [3]
    assert len(result.exceptions) == 2 + 2 * SIZE
    assert stub.opened["night-1.1-0"]["group_size"] == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group_size": 2}, "started with group_size=4 and can't continue with 2"),
        ({"model": "other"}, "started with model='m' and can't continue with 'other'"),
        ({"scenarios": ["a", "x"]}, "scenario 1 was 'b' when the loop 'night' began, and is 'x' now"),
    ],
)
async def test_a_loop_does_not_go_on_as_another_one(options: dict[str, Any], said: str) -> None:
    stub = StubGateway()
    await run(stub)
    with pytest.raises(ValueError, match=said):
        await run(stub, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"concurrency": 0},
        {"max_staleness": -1},
        {"tries": 0},
        {"scenarios": []},
        {"group_size": 1},
        {"epochs": 0},
        {"name": ""},
        {"name": "a\nb"},
        {"name": "n" * 151},
        {"evaluate_every": 2},
    ],
)
async def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="scenarios" if "scenarios" in options else next(iter(options))):
        await run(StubGateway(), **options)
