"""The figures of the demo's report."""

from __future__ import annotations

import json

import pytest

from examples.tictactoe.report import difference, win_rate
from journeywork.evaluation import EntrantResult, EvaluationReport, parse_entrant
from journeywork.evaluation.results import TaskResult
from journeywork.statistics import paired_difference
from journeywork.trajectory import Usage

REST = {"draw": 0.1, "illegal": 0.0}


def played(name: str, *wins: float | None) -> EntrantResult:
    """An entrant that won this share of each batch of 20 games; `None`: the batch failed."""
    tasks = [
        TaskResult(
            str(n), {"win": share, "loss": 0.9 - share, "games": 20.0, **REST} if share is not None else {}, 1, 0
        )
        for n, share in enumerate(wins)
    ]
    return EntrantResult(parse_entrant(name), name, tuple(tasks), Usage(), (), 1.0)


def report(before: EntrantResult, after: EntrantResult) -> EvaluationReport:
    return EvaluationReport("e", "", "", (before, after))


def test_games_without_a_result_count_for_nothing() -> None:
    rate = win_rate(played("m@0", 0.5, None, 0.3))
    assert rate["value"] == pytest.approx(0.4)
    assert rate["games"] == 40
    assert rate["outcomes"] == {"win": 16, "draw": 4, "loss": 20, "illegal": 0}


def test_the_difference_is_that_of_the_same_batches() -> None:
    found = difference(report(played("m@0", 0.2, 0.4, 0.6, 0.1), played("m@9", 0.4, 0.5, 0.8, None)))
    expected = paired_difference([0.2, 0.4, 0.6], [0.4, 0.5, 0.8])
    assert found["value"] == pytest.approx(expected.mean)
    assert found["ci95"] == pytest.approx([expected.low, expected.high])
    assert found["games"] == 60


def test_pairing_tells_more_than_two_separate_samples() -> None:
    shares = [n / 400 for n in range(350)]
    low, high = difference(report(played("m@0", *shares), played("m@9", *(s + 0.1 + s / 100 for s in shares))))["ci95"]
    own_low, own_high = win_rate(played("m@0", *shares))["ci95"]
    assert high - low < (own_high - own_low) / 1.5


def test_one_batch_says_little_and_no_batch_nothing() -> None:
    assert win_rate(played("m@0"))["ci95"] == [0.0, 1.0]
    one = report(played("m@0", 0.5), played("m@9", 0.7))
    assert win_rate(one.entrants[0])["ci95"] == [0.0, 1.0]
    assert difference(one)["ci95"] == [-1.0, 1.0]
    assert json.loads(json.dumps(difference(one)))["value"] == pytest.approx(0.2)
