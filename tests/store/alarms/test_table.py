"""Each alarm holds for events that call for it, and for no others."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.config import AlarmsConfig, BudgetConfig, Config, VllmConfig
from pipeline.events import AlarmChanged, Event
from pipeline.log.health import Fill
from pipeline.log.unwritten import Unwritten
from store.alarms.table import ALARMS, threshold
from store.docs import runnable
from store.reading import sql
from tests.store.alarms import kit
from tests.store.kit import fill

FULL, ROOMY = Fill("ROLLOUTS", "stream", 81, 100), Fill("ROLLOUTS", "stream", 79, 100)
BUDGET, VLLM = (
    BudgetConfig(judge_usd=5.0, gpu_hours=1.0, sampled_tokens=1000),
    VllmConfig(urls=(f"http://{kit.REPLICA}/",)),
)
LATE, SOON = Unwritten("store-rollouts", 0.51, "waits"), Unwritten("store-rollouts", 0.49, "waits")


def found(
    folder: Path,
    name: str,
    events: list[Event],
    *measured: Sequence[Fill] | Sequence[Unwritten] | Sequence[str],
    budget: BudgetConfig = BUDGET,
) -> list[AlarmChanged]:
    config = Config(run_dir=str(folder), budget=budget, alarms=AlarmsConfig(**kit.SETTINGS), vllm=VLLM)
    return kit.conditions(config, name, events, measured or ((),))


def test_each_alarm_has_its_cases() -> None:
    assert len(ALARMS) == len(kit.BY_NAME)
    assert set(kit.cases()) == set(kit.BY_NAME)


@pytest.mark.parametrize("name", kit.BY_NAME)
def test_an_alarm_holds_where_its_condition_does_and_nowhere_else(name: str, tmp_path: Path) -> None:
    (one,) = found(tmp_path / "a", name, kit.cases()[name][0], (FULL,), (LATE,), ("a.parquet",))
    assert one.threshold == threshold(Config(budget=BUDGET), kit.BY_NAME[name])
    assert one.detail
    below = ("judge_drift", "replica_behind")
    assert one.value >= one.threshold or name in below
    assert found(tmp_path / "b", name, kit.cases()[name][1], (ROOMY,), (SOON,)) == []
    assert found(tmp_path / "begun", name, []) == []


@pytest.mark.parametrize(
    ("name", "make", "detail"),
    [
        (
            "sampler_mismatch",
            lambda: kit.letters(3, "sampler_mismatch", "trainer"),
            "the trainer refused to train 3 groups",
        ),
        ("judge_drift", lambda: kit.anchors(None, alarm=True), "no anchor could be judged"),
        # The newest event is that of a process without failures.
        (
            "judge_failing",
            lambda: kit.passes(8, 8, 1_000_000) + kit.passes(0, 2),
            "8 of 10 passes gave no scores; the last one: the reply could not be read 4 times",
        ),
        ("over_judge_budget", lambda: kit.costs(5.5, 1.0, 10), "5.5 of 5 USD are spent (budget.judge_usd)"),
        ("replica_behind", lambda: kit.steps("kl", [0.1, 0.1]), f"{kit.REPLICA} serves m@0 at most; m@2 was published"),
        # The server restarted, and its agent could not load the newest version again.
        (
            "replica_behind",
            lambda: (
                kit.steps("kl", [0.1, 0.1])
                + kit.loads(1, 2, server_start="9", ago_us=9)
                + kit.loads(1, server_start="10")
            ),
            f"{kit.REPLICA} serves m@1 at most; m@2 was published",
        ),
        (
            "replica_behind",
            lambda: kit.steps("kl", [9.0] * kit.STEPS, branch="b") + kit.loads(0, replica="10.0.0.9:1"),
            None,
        ),
        ("kl_rise", lambda: kit.steps("kl", [9.0] * kit.STEPS, branch="b"), None),
    ],
)
def test_what_an_alarm_says_of_events(
    name: str, make: Callable[[], list[Event]], detail: str | None, tmp_path: Path
) -> None:
    assert [one.detail for one in found(tmp_path, name, make())] == ([] if detail is None else [detail])


def test_a_condition_without_a_number_has_the_value_nan(tmp_path: Path) -> None:
    (unjudged,) = found(tmp_path / "a", "judge_drift", kit.anchors(None, alarm=True))
    (diverged,) = found(tmp_path / "b", "kl_rise", kit.steps("kl", [0.1] * kit.STEPS + [math.nan] * kit.STEPS))
    assert math.isnan(unjudged.value)
    assert math.isnan(diverged.value)


def test_a_disk_has_a_higher_limit_than_a_stream(tmp_path: Path) -> None:
    disks = Fill("almost", "disk", 89, 100), Fill("full", "disk", 90, 100)
    assert [one.about for one in found(tmp_path, "log_full", [], disks)] == ["full"]


def test_a_loss_and_a_wait_of_one_consumer_are_one_alarm(tmp_path: Path) -> None:
    waiting = LATE, Unwritten("store-rollouts", 1.0, "lost"), Unwritten("store-groups", 0.6, "waits")
    groups, rollouts = found(tmp_path, "store_behind", [], (), waiting)
    assert (groups.about, groups.detail) == ("store-groups", "waits")
    assert (rollouts.about, rollouts.value, rollouts.detail) == ("store-rollouts", 1.0, "lost; waits")


def test_without_a_budget_nothing_is_used_up(tmp_path: Path) -> None:
    fill(tmp_path, *kit.costs(5.5, 1.0, 10))
    for name in ("over_judge_budget", "over_gpu_budget", "over_token_budget"):
        assert found(tmp_path, name, [], budget=BudgetConfig()) == []


# -- the reference page ----------------------------------------------------------------------------------------------


def test_the_queries_of_the_page_run_as_they_are(tmp_path: Path) -> None:
    events = [event for name in ("dead_letters", "sampler_mismatch", "judge_drift") for event in kit.cases()[name][0]]
    fill(tmp_path, *events + kit.loads(1))
    asked = set(kit.BY_NAME) - {"log_full", "store_behind", "file_damaged"}
    with sql.connect(tmp_path) as connection:
        holding = {name for name in asked if connection.sql(runnable(kit.BY_NAME[name])).fetchall()}
    assert holding == {"dead_letters", "sampler_mismatch", "judge_drift", "replica_behind"}
