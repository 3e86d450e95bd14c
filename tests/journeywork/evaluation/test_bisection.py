"""The search for the step at which a task was lost: over a stub of the gateway, and what its test promises."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from journeywork.evaluation.bisection import Limits, SequentialTest, UndecidedError, bisect, main
from journeywork.trajectory import Trajectory
from tests.kits.stub_gateway import StubGateway

pytestmark = pytest.mark.anyio
TASKS = [f"task {n}" for n in range(8)]


@pytest.fixture
def stub() -> StubGateway:
    return StubGateway(step=12)


def winning(stub: StubGateway, share: Callable[[int], float], seed: int = 0) -> Callable[..., object]:
    """A rollout whose reward is 1 with the probability that `share` gives for the version's step."""
    rng = random.Random(seed)

    async def rollout(run: Trajectory, _: str) -> float:
        return float(rng.random() < share(int(stub.opened[run.id]["pinned"].rpartition("@")[2])))

    return rollout


@pytest.mark.parametrize("culprit", [1, 2, 6, 7, 12])
async def test_it_finds_the_step_that_lost_the_task(stub: StubGateway, culprit: int) -> None:
    rollout = winning(stub, lambda step: 0.9 if step < culprit else 0.3, seed=culprit)
    async with stub.client() as client:
        found = await bisect(client, "m@0", "m@12", TASKS, rollout)
    assert (found.culprit.version, found.before.version) == (f"m@{culprit}", f"m@{culprit - 1}")
    assert found.comparisons <= 5  # log2(12) + 1, rounded up
    assert 0.4 < found.threshold < 0.8
    assert {run["split"] for run in stub.opened.values()} == {"val"}
    assert stub.evaluations == []


async def test_versions_that_are_gone_are_passed_over(stub: StubGateway) -> None:
    stub.retired = {"m@6", "m@7", "m@8"}
    rollout = winning(stub, lambda step: 0.9 if step < 7 else 0.3)
    async with stub.client() as client:
        found = await bisect(client, "m@0", "m@12", TASKS, rollout)
    assert (found.culprit.version, found.before.version) == ("m@9", "m@5")


async def test_what_the_runs_do_not_show_is_said(stub: StubGateway) -> None:
    async with stub.client() as client:
        for share, why in (
            (lambda step: 0.2 if step < 7 else 0.9, "m@0 is not better than m@12"),
            (
                lambda step: {0: 1.0, 12: 0.0}.get(step, 0.5),
                "m@6: after 160 runs its mean, .* is not shown .* a distance of 0.22: give",
            ),
        ):
            with pytest.raises(UndecidedError, match=why):
                await bisect(client, "m@0", "m@12", TASKS, winning(stub, share), Limits(rounds=5))
        for good, bad in (("m@3", "m@3"), ("m@4", "m@3"), ("m@0", "other@3")):
            with pytest.raises(ValueError, match=r"two versions of one model|has no model"):
                await bisect(client, good, bad, TASKS, winning(stub, lambda _: 1.0))


async def test_easy_tasks_do_not_decide_before_hard_ones(stub: StubGateway) -> None:
    """m@6 always wins half of the tasks, the first ones: its mean is the threshold."""
    tasks = [f"task {n}" for n in range(50)]

    async def rollout(run: Trajectory, task: str) -> float:
        step = int(stub.opened[run.id]["pinned"].rpartition("@")[2])
        return float(step < 6 or (step == 6 and tasks.index(task) < 25))

    async with stub.client() as client:
        for seed in range(2):
            with pytest.raises(UndecidedError, match="m@6: after 100 runs"):
                await bisect(client, "m@0", "m@12", tasks, rollout, Limits(rounds=2, seed=seed))


@pytest.mark.parametrize("mean", [0.5, 0.2])
def test_a_mean_at_the_threshold_is_rarely_found_on_a_side(mean: float) -> None:
    rng, sides = random.Random(7), 0
    for _ in range(400):
        test = SequentialTest(mean, 0.05)
        for _ in range(200):
            test.add(float(rng.random() < mean))
            if test.side:
                break
        sides += test.side != 0
    assert sides <= 32  # 20 expected at most; 32 or more with probability below 0.01


def test_the_test_is_quick_where_the_mean_is_far_away() -> None:
    rng, needed = random.Random(7), []
    for _ in range(200):
        test = SequentialTest(0.6, 0.01)
        while not test.side:
            test.add(float(rng.random() < 0.9))
        assert test.side == 1
        needed.append(len(test.values))
    assert sorted(needed)[100] <= 40


def test_the_command_prints_text_or_one_json_object(
    stub: StubGateway, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("journeywork.evaluation.bisection.client_of", lambda url, args: stub.client())
    rollout: Any = winning(stub, lambda step: float(step < 7))

    async def printing(run: Trajectory, task: str) -> Any:
        print(f"playing {task}")  # noqa: T201
        return await rollout(run, task)

    monkeypatch.setattr("journeywork.evaluation.bisection.load_rollout", lambda _: printing)
    args = ["m@0", "m@12", "--url", "http://x", "--rollout", "a:b"]
    args += ["--scenarios", "tests.journeywork.evaluation.kit:held_out"]
    main(args)
    assert "m@7 lost them, after m@6: 5 comparisons, threshold 0.5" in capsys.readouterr().out
    main([*args, "--json"])
    printed = capsys.readouterr()
    assert "playing a1=x" in printed.err
    told = json.loads(printed.out)
    played = told.pop("played")
    assert told == {"culprit": "m@7", "before": "m@6", "threshold": 0.5, "alpha": 0.05, "comparisons": 5}
    assert [(p["version"], p["mean"], p["lost"]) for p in played[:2]] == [("m@0", 1, False), ("m@12", 0, True)]
    assert len(played) == 6
    assert all(p["runs"] > 0 for p in played)


def test_arguments_that_can_t_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    kit = "tests.journeywork.evaluation.kit"
    with pytest.raises(SystemExit) as ended:
        main(["m@1", "m@2", "--rollout", f"{kit}:none", "--scenarios", f"{kit}:held_out"])
    assert ended.value.code == 2
    assert "has no 'none'" in capsys.readouterr().err
