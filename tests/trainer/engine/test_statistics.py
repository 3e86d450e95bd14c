"""Metrics of a step."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tests.trainer.kit import sequence
from trainer.engine.statistics import sampler_metrics


def on_policy(sampled: list[float], computed: list[float]) -> dict[str, float]:
    """The metrics of one sequence whose trained tokens have these logprobs by the sampler and by the trainer."""
    length = 1 + len(sampled)
    tokens = sequence([3] * length, list(range(1, length)))
    tokens = dataclasses.replace(tokens, logprobs=np.array([math.nan, *sampled], np.float32))
    metrics = sampler_metrics([tokens], [np.array(computed, np.float32)], 0, 2.0)
    return {name: value for name, value in metrics.items() if name.startswith("on_policy")}


def test_tokens_without_a_recorded_logprob_are_not_compared() -> None:
    metrics = on_policy([-1.0, math.nan, -2.0], [-1.5, -9.0, -2.0])
    assert metrics == {"on_policy_logprob_diff": 0.25, "on_policy_logprob_diff_max": 0.5}
    assert on_policy([math.nan], [-1.0]) == {}


def test_a_nan_that_the_trainer_computes_is_not_hidden() -> None:
    metrics = on_policy([-1.0, -2.0], [-1.0, math.nan])
    assert math.isnan(metrics["on_policy_logprob_diff"])
    assert math.isnan(metrics["on_policy_logprob_diff_max"])
