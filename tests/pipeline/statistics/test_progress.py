"""The sentence about the training reward."""

import random

from journeywork.statistics import Sample
from pipeline.statistics.progress import reward_text


def test_a_single_version_and_single_groups_have_no_interval() -> None:
    first, last = Sample.of([0.5, 0.7]), Sample.of([0.8])
    assert reward_text(0, first, first) == "Training reward 0.600 in 2 groups; no later version has played."
    assert "(too few groups for an interval)" in reward_text(1, Sample.of([0.2]), last)


def test_a_reward_that_stays_seldom_seems_to_move_and_one_that_rises_is_seen() -> None:
    rng = random.Random(0)

    def win_rate(share: float) -> float:
        return sum(rng.random() < share for _ in range(8)) / 8

    def said(gain: float) -> str:
        first, last = (Sample.of([win_rate(0.4 + more) for _ in range(50)]) for more in (0.0, gain))
        return reward_text(30, first, last).rpartition(": ")[2]

    flat = [said(0.0) for _ in range(400)]
    assert flat.count("the difference may be chance).") >= 0.95 * 400 - 12  # three standard errors
    assert [said(0.3) for _ in range(40)] == ["it rose)."] * 40
    assert [said(-0.3) for _ in range(40)] == ["it fell)."] * 40


def test_a_sample_of_values_is_that_of_its_moments() -> None:
    assert Sample.of([1.0, 3.0]) == Sample(2, 2.0, 2.0, 1.0, 3.0)
    assert Sample.of([1.0]) == Sample(1, 1.0, None, 1.0, 1.0)
