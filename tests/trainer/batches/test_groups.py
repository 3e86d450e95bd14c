"""Pinned semantics: which members count, and their advantages. A change here needs a decision record."""

import msgspec
import numpy as np
import pytest

from pipeline.config import ConfigError, LossConfig, TrainerConfig
from pipeline.config.checks import check_trainer
from pipeline.events import GroupScored
from tests.trainer.kit import exchange, group, played, training_group
from trainer.batches.examples import make_examples
from trainer.batches.groups import GroupWithHistory, Refusal, group_metrics, trainable_members
from trainer.batches.tasks import WINDOW, EarlierReturns, EarlierRuns
from trainer.sequences import build


def refusal_of(group: GroupWithHistory, step: int, config: TrainerConfig) -> Refusal | None:
    bounded = group.within_staleness(step, config)
    return bounded if isinstance(bounded, Refusal) else None


def prepared(rewards: list[float]) -> GroupWithHistory:
    return played(group("g", rewards))


def test_the_batch_is_the_baseline_of_runs_without_a_group() -> None:
    """REINFORCE++: rewards normalised over the batch. A group of one and equal rewards are trained, too."""
    config = TrainerConfig(loss=LossConfig(baseline="batch", advantage_scaling="batch"))
    batch = [prepared([1.0]), prepared([0.0]), prepared([0.25, 0.25])]
    assert [g.refusal(0, config) for g in batch] == [None] * 3
    rewards = np.array([1.0, 0.0, 0.25, 0.25])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose([e.advantage for e in make_examples(batch, config)], expected, rtol=1e-10)
    assert [e.advantage for e in make_examples(batch[:1], config)] == [0.0]
    with pytest.raises(ConfigError, match="a group of one has no standard deviation"):
        check_trainer(TrainerConfig(loss=LossConfig(baseline="batch")))


def test_earlier_runs_of_the_task_are_the_baseline_and_the_own_run_is_left_out() -> None:
    """A function of the log before the group's event: other tasks, later groups and older verdicts do not count."""
    runs = EarlierRuns(1.0)
    log = [
        group("a", [1.0], task="t"),
        group("b", [0.2], task="other"),
        group("c", [0.5, 0.0], task="t"),
        group("a", [0.4], task="t", judge="second"),
        group("d", [0.9, 0.1, 0.3], task="t"),
        group("e", [7.0], task="t"),
        group("f", [0.6], owner="key"),
        group("g", [0.8], owner="key"),
        group("h", [0.25], owner="another"),
    ]
    for seq, scored in enumerate(log, 1):
        runs.add(scored, trainable_members(scored), seq)
        runs.add(scored, trainable_members(scored), seq)  # it is delivered again
    batch = [played(log[i]) for i in (4, 3, 7, 8)]
    for trained, seq in zip(batch, (5, 4, 8, 9), strict=True):
        trained.admitted.earlier = runs.before(trained.event, seq)
    config = TrainerConfig(loss=LossConfig(baseline="task", advantage_scaling="none"))
    assert [g.refusal(0, config) for g in batch] == [None] * 4
    first_of_its_key = 0.25 - np.mean([0.9, 0.1, 0.3, 0.4, 0.8, 0.25])
    expected = [
        0.9 - (0.5 + 0.0 + 0.4 + 0.1 + 0.3) / 5,
        0.1 - (0.5 + 0.0 + 0.4 + 0.9 + 0.3) / 5,
        0.3 - (0.5 + 0.0 + 0.4 + 0.9 + 0.1) / 5,
        0.4 - (0.5 + 0.0) / 2,
        0.8 - 0.6,
        first_of_its_key,
    ]
    np.testing.assert_allclose([e.advantage for e in make_examples(batch, config)], expected, rtol=1e-10)
    runs.forget(6 + WINDOW)
    assert runs.before(log[4], 5) == EarlierReturns()
    assert runs.before(log[7], 8) == EarlierReturns(1, (0.6,))


def with_members(scored: GroupScored, **changed: dict[int, object]) -> GroupScored:
    members = list(scored.members)
    for field, values in changed.items():
        for i, value in values.items():
            members[i] = msgspec.structs.replace(members[i], **{field: value})
    return msgspec.structs.replace(scored, members=tuple(members))


def test_only_scored_members_of_the_training_split_count() -> None:
    """Infrastructure's failures, masked and validation runs neither train nor move the baseline, nor does NaN."""
    rewards = [0.0, 1.0, -50.0, -50.0, -50.0, float("nan")]
    scored = with_members(group("g", rewards), outcome={2: "no_result", 3: "masked"}, split={4: "val"})
    out = make_examples([played(scored)], TrainerConfig(loss=LossConfig(advantage_scaling="none")))
    assert {e.sequence.trajectory: e.advantage for e in out} == {"g-0": -0.5, "g-1": 0.5}


@pytest.mark.parametrize(
    ("scored", "step", "reason"),
    [
        (group("g", [0.1] * 8), 0, "no_variance"),  # a spread of 1e-17 in floating point: that is no signal
        (group("g", [0.1 + 0.2, 0.3]), 0, "no_variance"),
        (group("g", [1.0, 1.0 - 5e-7]), 0, "no_variance"),
        (group("g", [1.0]), 0, "too_small"),
        (with_members(group("g", [0.0, 1.0]), outcome={0: "no_result"}), 0, "too_small"),
        (with_members(group("g", [0.0, 1.0]), split={0: "val", 1: "val"}), 0, "validation"),
        (group("g", [0.0, 1.0], step=3), 5, None),
        (group("g", [0.0, 1.0], step=3), 6, "stale"),
        (group("g", [0.0, 1.0], step=3, offline=True), 600, None),
        (group("g", [0.0, 1.0], step=0, exchanges=0), 600, "no_tokens"),
    ],
)
def test_a_group_that_can_not_train_is_refused_with_the_reason(
    scored: GroupScored, step: int, reason: str | None
) -> None:
    config, made_of = TrainerConfig(max_staleness=2), training_group(scored, [])
    refused = made_of.refusal(step, config)
    if reason == "no_tokens":  # known once its exchanges are read
        assert refused is None
        refused = refusal_of(made_of, step, config)
        assert refused is not None
        assert refused.detail.endswith(
            "none made a recorded call; a run's client needs the run's own base_url and api_key (`run.openai`)"
        )
    assert (refused and refused.reason) == reason


def test_old_tokens_of_a_long_trajectory_become_context() -> None:
    """A trajectory that ran across many steps keeps its fresh tokens: long tasks must not starve."""
    (sequence,) = build("t", [exchange("t", 0, [5], [7], step=1), exchange("t", 1, [5, 7, 6], [8], step=4)])
    config = TrainerConfig(max_staleness=2)
    group_of_one = training_group(group("t", [0.0, 1.0]), [sequence])
    fresh = group_of_one.within_staleness(5, config)
    assert isinstance(fresh, GroupWithHistory)
    (kept,) = fresh.sequences
    assert fresh.stale_tokens == 1
    assert kept.ids[kept.loss_mask].tolist() == [8]
    refused = group_of_one.within_staleness(9, config)
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.detail[:12]) == ("stale", "all 2 tokens")


def test_trajectory_weighting_gives_long_and_short_trajectories_equal_weight() -> None:
    scored = group("g", [0.0, 1.0])
    short = build("g-0", [exchange("g-0", 0, [5], [7] * 2)])
    long = build("g-1", [exchange("g-1", 0, [5], [7] * 6)])
    config = TrainerConfig(loss=LossConfig(weighting="trajectory"))
    out = make_examples([training_group(scored, [*short, *long])], config)
    assert [e.weight * e.sequence.trained_tokens for e in out] == pytest.approx([4, 4])
    assert [e.weight for e in make_examples([training_group(scored, [*short, *long])], TrainerConfig())] == [1, 1]


def test_many_sequences_of_a_trajectory_share_its_weight_where_the_loss_averages_sequences() -> None:
    scored = group("g", [0.0, 1.0])
    one = build("g-0", [exchange("g-0", 0, [5], [7])])
    three = build("g-1", [exchange("g-1", i, [6 + i], [7]) for i in range(3)])
    out = make_examples(
        [training_group(scored, [*one, *three])], TrainerConfig(loss=LossConfig(weighting="trajectory", type="grpo"))
    )
    assert [e.weight for e in out] == pytest.approx([2, 2 / 3, 2 / 3, 2 / 3])


def test_a_supervised_step_takes_each_groups_own_rewards() -> None:
    """Two verdict sets of one group are in one step."""
    sets = [played(group("g", [reward, 0.5], judge=judge)) for judge, reward in (("a", 1.0), ("b", 0.0))]
    out = make_examples(sets, TrainerConfig(loss=LossConfig(type="sft")))
    assert [e.advantage for e in out] == [1.0, 0.5, 0.0, 0.5]


def test_a_step_has_the_means_of_a_bounded_number_of_agents_metrics() -> None:
    """The fault that was: every name of every run was a metric of the step, which all services keep in memory."""
    runs = group("g", [0.0, 1.0])
    named = {f"m{n}": 1.0 for n in range(200)}, {f"m{n}": 3.0 for n in range(100, 400)}
    members = tuple(msgspec.structs.replace(m, metrics=of) for m, of in zip(runs.members, named, strict=True))
    metrics = group_metrics([played(msgspec.structs.replace(runs, members=members))], [])
    of_runs = {name: value for name, value in metrics.items() if name.startswith("run/")}
    assert len(of_runs) == 256
    assert (of_runs["run/m0"], of_runs["run/m100"], of_runs["run/m200"]) == (1.0, 2.0, 3.0)
