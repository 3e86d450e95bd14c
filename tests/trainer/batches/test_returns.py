"""Rewards of calls: every advantage against its literal formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.config import LossConfig, TrainerConfig
from pipeline.events import GroupScored, Member
from tests.trainer.kit import exchange, training_group
from trainer.batches.groups import TrainingGroup, examples
from trainer.batches.returns import returns_of
from trainer.batches.sequences import build

Runs = dict[str, tuple[float, dict[int, float], int]]
"""Name of a run to its reward, the rewards of its calls, and its number of calls."""


def made(group: str, runs: Runs) -> TrainingGroup:
    """Runs whose calls continue each other in one sequence; each samples two tokens."""
    members, sequences = [], []
    for name, (reward, of_calls, calls) in runs.items():
        rewards = {str(call): r for call, r in of_calls.items()}
        members.append(Member(trajectory=name, reward=reward, call_rewards=rewards, exchanges=calls))
        prompt: list[int] = []
        history = []
        for call in range(calls):
            prompt = [*prompt, 5]
            history.append(exchange(name, call, prompt, [7, 8]))
            prompt = [*prompt, 7, 8]
        sequences += build(name, history)
    return training_group(
        GroupScored(project="p", group=group, model="tiny", judge="j", members=tuple(members)), sequences
    )


def literal(runs: Runs, gamma: float) -> dict[str, list[float]]:
    """The returns, written down as the formula is."""
    return {
        name: [
            sum(gamma ** (j - k) * of_calls.get(j, 0.0) for j in range(k, calls))
            + gamma ** (calls - 1 - k) * reward
            for k in range(calls)
        ]
        for name, (reward, of_calls, calls) in runs.items()
    }


def of_tokens(group: list[TrainingGroup], **loss: Any) -> dict[str, list[float]]:
    """The advantage of each trained token, by run."""
    made = examples(group, TrainerConfig(loss=LossConfig(**loss)))
    return {
        e.sequence.trajectory: [e.advantage] * e.sequence.trained_tokens
        if e.call_advantages is None
        else e.call_advantages.tolist()
        for e in made
    }


RUNS: Runs = {
    "a": (0.5, {1: 1.0}, 3),
    "b": (-1.0, {0: 0.25, 2: -0.5}, 4),
    "c": (0.0, {}, 1),
    "d": (0.75, {0: 1.0}, 2),
}
OTHERS: Runs = {"e": (0.3, {0: 0.1}, 2), "f": (0.9, {}, 2)}


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.5, 0.0])
@pytest.mark.parametrize("scaling", ["none", "group", "batch"])
@pytest.mark.parametrize("baseline", ["group", "batch"])
def test_an_advantage_is_the_calls_return_less_that_of_its_position(
    gamma: float, scaling: str, baseline: str
) -> None:
    if (baseline, scaling) == ("batch", "group"):
        return
    found = of_tokens(
        [made("g", RUNS), made("h", OTHERS)],
        turn_discount=gamma,
        advantage_scaling=scaling,
        baseline=baseline,
    )
    of_groups = [literal(RUNS, gamma), literal(OTHERS, gamma)]
    if not any(of_calls for _, of_calls, _ in OTHERS.values()) and gamma == 1.0:
        of_groups[1] = {name: returns[:1] for name, returns in of_groups[1].items()}
    everything = of_groups[0] | of_groups[1]
    for returns in of_groups:
        compared = everything if baseline == "batch" else returns
        spread = everything if scaling == "batch" else returns
        divisor = 1.0 if scaling == "none" else np.std([g for r in spread.values() for g in r], ddof=1) + 1e-4
        for name, own in returns.items():
            expected = []
            for call, value in enumerate(own):
                mean = sum(r[min(call, len(r) - 1)] for r in compared.values()) / len(compared)
                expected += [(value - mean) / divisor] * 2
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-10)


def test_one_reward_a_run_gives_the_advantages_of_runs_bit_for_bit() -> None:
    rewards = [0.1, 0.7, 0.2, 1.0 / 3]
    runs: Runs = {f"r{i}": (reward, {}, 3) for i, reward in enumerate(rewards)}
    of_runs = np.array(rewards)
    expected = (of_runs - of_runs.mean()) / (of_runs.std(ddof=1) + 1e-4)
    made_of = examples([made("g", runs)], TrainerConfig())
    assert [e.advantage for e in made_of] == expected.tolist()
    assert all(e.call_advantages is None for e in made_of)


def test_normalisation_is_that_of_tokens() -> None:
    found = of_tokens(
        [made("g", RUNS)], advantage_scaling="none", advantage_normalization="mean_abs", advantage_balance=0.5
    )
    tokens = np.array([a for of_run in found.values() for a in of_run])
    np.testing.assert_allclose(np.abs(tokens).mean(), 1.0, rtol=1e-12)


def test_equal_rewards_with_other_rewards_of_calls_are_compared() -> None:
    config = TrainerConfig()
    alike: Runs = {"a": (0.0, {0: 1.0}, 2), "b": (0.0, {0: 1.0}, 2)}
    refused = made("g", alike).refuse(0, config)
    assert refused is not None
    assert refused.reason == "no_variance"
    assert made("g", {**alike, "c": (0.0, {1: 1.0}, 2)}).refuse(0, config) is None


def test_rewards_of_calls_that_were_not_captured_count_for_the_calls_before_them() -> None:
    member = Member(trajectory="a", reward=1.0, call_rewards={"2": 0.5, "9": 4.0, "x": 1.0})
    assert returns_of(member, 3, 0.5).tolist() == [0.375, 0.75, 1.5]
