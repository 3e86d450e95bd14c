"""The sentence about the training reward."""

from __future__ import annotations

import random

from pipeline.statistics.intervals import Sample
from pipeline.statistics.progress import first_and_last, reward_text


def test_the_first_and_the_last_fifth_of_the_versions_are_compared_ten_of_them_at_most() -> None:
    rewards = {step: [float(step), float(step)] for step in range(40)}
    steps, first, last = first_and_last(rewards)
    assert (steps, first.count, first.mean, last.count, last.mean) == (39, 16, 3.5, 16, 35.5)
    steps, first, last = first_and_last({step: [float(step)] for step in range(100)})
    assert (steps, first.count, first.mean, last.mean) == (99, 10, 4.5, 94.5)


def test_a_single_version_and_single_groups_have_no_interval() -> None:
    single = reward_text(*first_and_last({3: [0.5, 0.7]}))
    assert single == "Training reward 0.600 in 2 groups; no later version has played."
    assert "(too few groups for an interval)" in reward_text(*first_and_last({0: [0.2], 1: [0.8]}))


def test_a_reward_that_stays_seldom_seems_to_move_and_one_that_rises_is_seen() -> None:
    rng = random.Random(0)

    def said(gain: float) -> str:
        rewards = {
            step: [sum(rng.random() < 0.4 + gain * step / 30 for _ in range(8)) / 8 for _ in range(8)]
            for step in range(31)
        }
        return reward_text(*first_and_last(rewards)).rpartition(": ")[2]

    flat = [said(0.0) for _ in range(400)]
    assert flat.count("the difference may be chance).") >= 0.95 * 400 - 12  # three standard errors
    assert [said(0.4) for _ in range(40)] == ["it rose)."] * 40
    assert [said(-0.4) for _ in range(40)] == ["it fell)."] * 40


def test_a_sample_of_values_is_that_of_its_moments() -> None:
    assert Sample.of([1.0, 3.0]) == Sample(2, 2.0, 2.0, 1.0, 3.0)
    assert Sample.of([1.0]) == Sample(1, 1.0, None, 1.0, 1.0)
