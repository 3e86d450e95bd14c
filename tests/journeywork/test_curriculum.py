"""Which tasks a curriculum chooses, by the posterior of their rewards."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from journeywork.curriculum import Curriculum, Recorded, read_history
from journeywork.transport import JourneyworkError

TASKS = ["easy", "even", "hard"]


def taught(**options: Any) -> Curriculum[str]:
    """Eight attempts at each task: all, half and none succeed."""
    tasks = Curriculum(TASKS, group_size=8, **options)
    for name, wins in (("easy", 8), ("even", 4), ("hard", 0)):
        tasks.record(name, [1.0] * wins + [0.0] * (8 - wins))
    return tasks


def beta_binomial(successes: float, failures: float, n: int) -> float:
    """The probability that n draws are not all equal, if the success is Beta distributed."""

    def all_of(a: float, b: float) -> float:
        logs = math.lgamma(a + n) - math.lgamma(a) + math.lgamma(a + b) - math.lgamma(a + b + n)
        return math.exp(logs)

    return 1 - all_of(successes, failures) - all_of(failures, successes)


def test_with_rewards_of_0_and_1_the_estimate_is_the_beta_posteriors() -> None:
    tasks = taught(prior=2.0)
    # Half of all 24 rewards are 1, so the prior of each task is Beta(1, 1).
    for name, wins in (("easy", 8), ("even", 4), ("hard", 0)):
        assert tasks.probability(name) == pytest.approx(beta_binomial(1 + wins, 9 - wins, 8), rel=1e-9)


def test_any_number_of_reward_values_is_counted_exactly() -> None:
    """Against the sum over all outcomes of a group of three, drawn from Pólya's urn."""
    tasks = Curriculum(["a", "b"], group_size=3, prior=1.5)
    tasks.record("a", [0.0, 0.0, 0.4])
    tasks.record("b", [1.0])
    start = {0.0: 1.5 * 2 / 4 + 2, 0.4: 1.5 / 4 + 1, 1.0: 1.5 / 4}
    different = 0.0
    for drawn in itertools.product(start, repeat=3):
        urn, chance = Counter(start), 1.0
        for value in drawn:
            chance *= urn[value] / sum(urn.values())
            urn[value] += 1
        different += chance if len(set(drawn)) > 1 else 0.0
    assert tasks.probability("a") == pytest.approx(different, rel=1e-12)


def test_tasks_are_sampled_in_proportion() -> None:
    tasks = taught(explore=0.0)
    chosen = Counter[str]()
    for _ in range(4000):
        task = tasks.next()
        tasks.record(task, [])
        chosen[task] += 1
    total = sum(tasks.probability(t) for t in TASKS)
    for name in TASKS:
        share = tasks.probability(name) / total
        # Five standard errors of a share of 4,000 draws.
        assert abs(chosen[name] / 4000 - share) < 5 * math.sqrt(share * (1 - share) / 4000)
    assert chosen["even"] > chosen["easy"]


def test_old_rewards_lose_weight() -> None:
    tasks = taught(half_life=5.0)
    before = tasks.probability("easy")
    for step in range(1, 11):
        tasks.record("even", [0.0, 1.0] * 4, step)
    assert tasks.step == 10
    assert before < tasks.probability("easy") < tasks.probability("even")
    expected = taught(half_life=5.0)
    expected.restore([Recorded("even", 0, 0.5)])
    late = taught(half_life=1.0)
    late.record("even", [1.0], 10)
    late.record("hard", [0.0], 0)  # as old as it is, whenever it arrives
    same = taught(half_life=1.0)
    same.record("hard", [0.0], 0)
    same.record("even", [1.0], 10)
    assert late.probability("hard") == pytest.approx(same.probability("hard"), rel=1e-12)


def test_a_task_in_play_is_not_chosen_again() -> None:
    tasks = taught()
    chosen = [tasks.next() for _ in range(3)]
    assert sorted(chosen) == TASKS
    assert tasks.next() in TASKS  # none is left
    tasks.record("hard", [])
    assert tasks.next() == "hard"


def test_without_history_every_task_is_as_likely_and_no_task_is_given_up() -> None:
    tasks = Curriculum(TASKS, seed=3)
    assert {tasks.probability(t) for t in TASKS} == {1.0}
    for name in TASKS:
        tasks.record(name, [0.0] * 1000)
    found = set()
    for _ in range(200):
        found.add(task := tasks.next())
        tasks.record(task, [])
    assert found == set(TASKS)


def test_rewards_that_hardly_ever_repeat_are_not_kept_for_ever() -> None:
    rng = random.Random(0)
    tasks = Curriculum(TASKS)
    tasks.restore(Recorded(rng.choice(TASKS), n // 100, rng.random()) for n in range(20_000))
    assert all(tasks.probability(t) > 0.99 for t in TASKS)
    assert len(tasks._all.weights) <= 65
    assert all(len(counts.weights) <= 65 for counts in tasks._seen.values())


def test_a_restored_curriculum_is_the_same() -> None:
    rng = random.Random(0)
    history = [Recorded(rng.choice(TASKS), n // 10, float(rng.random() < 0.5)) for n in range(200)]
    whole, rest = Curriculum(TASKS), Curriculum(TASKS)
    for name, step, reward in history:
        whole.record(name, [reward], step)
    assert rest.restore([*history, Recorded("unknown", 3, 1.0)]) == 200
    assert [whole.probability(t) for t in TASKS] == [rest.probability(t) for t in TASKS]


@pytest.mark.parametrize(
    "options", [{"group_size": 1}, {"half_life": 0}, {"prior": 0.0}, {"explore": 1.5}, {"key": len}]
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Curriculum(TASKS, **options)


def test_a_history_that_cannot_be_read_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    with pytest.raises(JourneyworkError, match="the history could not be read: "):
        read_history("support", tmp_path / "nowhere")
    with pytest.raises(ValueError):
        read_history("x' OR 1")
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, '[{"task": "a", "step": 3, "reward": 0.5}]', "")

    monkeypatch.setattr(subprocess, "run", run)
    assert read_history("support", "runs/x") == [Recorded("a", 3, 0.5)]
    assert asked[0][:6] == [sys.executable, "-m", "pipeline", "sql", "--run-dir", "runs/x"]


def test_a_reward_that_cannot_be_kept_is_refused() -> None:
    tasks, untouched = taught(), taught()
    with pytest.raises(KeyError, match="the curriculum has no task with the key 'unknown'"):
        tasks.record("unknown", [1.0])
    with pytest.raises(KeyError, match="the curriculum has no task with the key 'unknown'"):
        tasks.task("unknown")
    for reward in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"a reward of the task 'even' is (nan|inf); it must be finite"):
            tasks.record("even", [1.0, reward])
    assert [tasks.probability(t) for t in TASKS] == [untouched.probability(t) for t in TASKS]
