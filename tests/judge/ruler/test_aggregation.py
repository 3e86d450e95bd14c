"""Orders, position bias and merging."""

import random
from statistics import mean

import pytest

from judge.ruler.aggregation import JudgePass, PositionBias, aggregate, draw_orders, pairwise_agreement


def judged(
    order: list[str], truth: dict[str, float], first: float = 0.0, noise: float = 0.0, rng: random.Random | None = None
) -> JudgePass:
    scores = {
        n: truth[n] + (first if i == 0 else 0.0) + (rng.gauss(0, noise) if rng else 0.0) for i, n in enumerate(order)
    }
    return JudgePass(tuple(order), scores)


def merged_bias(first: float, noise: float, groups: int = 60, k: int = 2) -> tuple[float, PositionBias]:
    """How much better than its worth a trajectory comes out for having been first, on average."""
    rng = random.Random(1)
    bias = PositionBias()
    gains = []
    for _ in range(groups):
        truth = {f"t{i}": rng.uniform(0.1, 0.6) for i in range(8)}
        done = [judged(o, truth, first, noise, rng) for o in draw_orders(sorted(truth), k, rng)]
        bias.update(done)
        off = {n: s - truth[n] for n, s in aggregate(done, bias).items()}
        led = {j.order[0] for j in done}
        gains.append(mean(off[n] for n in led) - mean(off[n] for n in off if n not in led))
    return mean(gains), bias


def test_the_position_bias_is_estimated_despite_noise() -> None:
    gain, bias = merged_bias(0.3, 0.1)
    assert abs(gain) < 0.05
    assert bias.first_position_effect() == pytest.approx(0.3, abs=0.06)


def test_without_position_bias_scores_are_hardly_corrected() -> None:
    _, bias = merged_bias(0.0, 0.05)
    assert bias.first_position_effect() == pytest.approx(0.0, abs=0.02)
    assert all(abs(e) < 0.03 for e in bias.effects(8))


def test_consecutive_orders_share_no_position_if_possible() -> None:
    for n in (2, 3, 8):
        first, second = draw_orders([f"t{i}" for i in range(n)], 2, random.Random(0))
        assert all(a != b for a, b in zip(first, second, strict=True))
        assert sorted(first) == sorted(second)
    assert draw_orders(["a"], 2, random.Random(0)) == [["a"], ["a"]]


def test_aggregated_scores_stay_between_0_and_1() -> None:
    assert aggregate([JudgePass(("a", "b"), {"a": 1.2, "b": -0.1})], PositionBias()) == {"a": 1.0, "b": 0.0}


def test_agreement_of_pairs() -> None:
    assert pairwise_agreement({"x": 0.9, "y": 0.1}, {"x": 0.85, "y": 0.15}) == 1.0
    assert pairwise_agreement({"x": 0.9, "y": 0.1}, {"x": 0.5, "y": 0.5}) == 0.5
    assert pairwise_agreement({"x": 1.0}, {"x": 1.0}) is None
