"""What feedback of one key may decide of a step."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config import LossConfig, TrainerConfig
from pipeline.events import GroupScored, Member
from tests.trainer.kit import exchange, training_group
from trainer.batches.graders import limit_graders
from trainer.batches.groups import Example, TrainingGroup, examples
from trainer.batches.sequences import build

CONFIG = TrainerConfig(loss=LossConfig(baseline="batch", advantage_scaling="none"))


def made(name: str, reward: float, graders: dict[str, float]) -> TrainingGroup:
    member = Member(trajectory=name, reward=reward, graders=graders)
    scored = GroupScored(project="p", group=name, model="tiny", judge="j", members=(member,))
    return training_group(scored, build(name, [exchange(name, 0, [5], [7, 7])]))


def decided(groups: list[TrainingGroup], made_of: list[Example], key: str) -> float:
    """The share of a key in the sum of absolute advantages."""
    parts = {m.trajectory: m.graders.get(key, 0.0) for g in groups for m in g.members}
    sizes = {e.sequence.trajectory: abs(e.advantage) * e.sequence.trained_tokens for e in made_of}
    return sum(sizes[t] * parts[t] for t in sizes) / sum(sizes.values())


@pytest.mark.parametrize("max_share", [0.05, 0.2, 0.4])
def test_ten_thousand_thumbs_of_one_key_decide_no_more_than_its_limit(max_share: float) -> None:
    rng = np.random.default_rng(7)
    groups = [made(f"thumb{i}", 1.0, {"fan": 1.0}) for i in range(10_000)]
    groups += [made(f"run{i}", float(rng.random()), {}) for i in range(200)]
    before = examples(groups, CONFIG)
    assert decided(groups, before, "fan") > max_share
    after, metrics = limit_graders(groups, before, max_share)
    assert metrics["graders_limited"] == 1
    assert metrics["grader_share"] == pytest.approx(decided(groups, before, "fan"))
    # With the limit's own size of what the others decide, which is unchanged.
    others = [
        (a.advantage, b.advantage)
        for a, b in zip(after, before, strict=True)
        if a.sequence.trajectory[0] == "r"
    ]
    assert all(a == b for a, b in others)
    fans = sum(abs(e.advantage) for e in after if e.sequence.trajectory[0] == "t")
    assert fans / (fans + sum(abs(a) for a, _ in others)) == pytest.approx(max_share, abs=1e-12)


def test_a_key_that_decided_a_part_of_rewards_loses_this_part_only() -> None:
    groups = [made("a", 1.0, {"x": 0.5}), made("b", 0.0, {})]
    after, _ = limit_graders(groups, examples(groups, CONFIG), 0.1)
    # Sizes 1 and 1, of which the key decided 0.5: the factor is 0.1 * 1.5 / (0.9 * 0.5) = 1 / 3.
    assert [e.advantage for e in after] == pytest.approx([0.5 * (1 - 0.5 * (2 / 3)), -0.5])


def test_a_key_alone_trains_nothing_below_a_limit_of_one_and_everything_at_it() -> None:
    groups = [made("a", 1.0, {"x": 1.0}), made("b", 0.0, {"x": 1.0})]
    before = examples(groups, CONFIG)
    assert [e.advantage for e in limit_graders(groups, before, 0.5)[0]] == [0.0, 0.0]
    after, metrics = limit_graders(groups, before, 1.0)
    assert ([e.advantage for e in after], metrics["graders_limited"]) == ([0.5, -0.5], 0.0)


def test_without_feedback_nothing_is_said_and_nothing_changes() -> None:
    groups = [made("a", 1.0, {}), made("b", 0.0, {})]
    before = examples(groups, CONFIG)
    assert limit_graders(groups, before, 0.1) == (before, {})
