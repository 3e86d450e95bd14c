"""Runs beyond the staleness bound: their correction, their effective sample size, and the bound on it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.config import ConfigError, TrainerConfig
from pipeline.config.checks import check_trainer
from tests.kits.settings import with_values
from tests.trainer import kit
from tests.trainer.kit import discards, steps_reach
from trainer.batches.examples import Example
from trainer.batches.groups import GroupWithHistory, Refusal
from trainer.engine.late import LateRunsError, late_metrics
from trainer.engine.loss_inputs import inputs_of
from trainer.sequences import OTHER_BRANCH, build
from trainer.staleness import is_late

LATE: dict[str, object] = {"late": "sequence_truncate", "max_staleness": 2}


def test_a_late_sequence_is_weighted_with_its_truncated_ratio_and_the_others_are_not() -> None:
    config = with_values(TrainerConfig(), LATE | {"loss.importance_clip": 1.5})
    recorded = [-1.0, -2.0, -0.5]
    made = [
        build(f"t{step}", [kit.exchange(f"t{step}", 0, [5], [7, 8, 9], logprobs=recorded, step=step)])[0]
        for step in (1, 2, 6, 4)
    ]
    late = [is_late(s, 4, config) for s in made]
    assert late == [True, False, True, False]  # 6: a later version of another run, by a replay
    assert not any(is_late(s, 4, TrainerConfig()) for s in made)
    current = torch.tensor([[-1.2, -2.1, -0.4], [-0.2, -2.5, -0.5], [-0.5, -1.0, -0.5], [-1.0, -2.0, -0.5]])
    given = inputs_of(
        [Example(s, 1.0, late=is_late_) for s, is_late_ in zip(made, late, strict=True)],
        current,
        config=config,
        sequences=4,
        tokens=12,
    )
    ratios = np.exp(current.numpy() - np.array(recorded))
    expected = np.minimum(ratios, 1.5)
    expected[0], expected[2] = np.exp(-0.2), 1.5
    np.testing.assert_allclose(given.weights.numpy(), expected, rtol=1e-6)


def test_the_effective_sample_size_is_kishs_and_bounds_what_is_trained() -> None:
    (sequence,) = build("t", [kit.exchange("t", 0, [5], [7], logprobs=[-1.0])])
    weights = [1.0, 0.5, 0.01, 3.0, 3.0]  # the last was 8 before it was truncated
    logprobs = [np.array([-1.0 + np.log(w)]) for w in (*weights[:-1], 8.0)]
    size = sum(weights) ** 2 / sum(w * w for w in weights)
    config = with_values(TrainerConfig(), LATE)
    metrics = late_metrics([sequence] * 5, logprobs, config)
    assert metrics == {"late_sequences": 5.0, "late_ess": pytest.approx(size, rel=1e-10)}
    with pytest.raises(LateRunsError, match=r"of 5 late sequences is 2.93, below trainer.late_min_ess = 0.6"):
        late_metrics([sequence] * 5, logprobs, with_values(config, {"late_min_ess": 0.6}))


@pytest.mark.parametrize("step", [1, 6, OTHER_BRANCH])
def test_nothing_of_a_group_is_late_once_its_late_runs_are_refused(step: int) -> None:
    """A replay's tokens may be of later versions, or of another branch's. They stayed late, so every attempt at the
    step was refused, and the healthy groups of the batch became dead letters."""
    config = with_values(TrainerConfig(), LATE)
    scored = kit.group("replayed", [0.0, 1.0], offline=True)
    late, fresh = (
        build(m.trajectory, [kit.exchange(m.trajectory, 0, [5], [7, 8, 9], step=at)])[0]
        for m, at in zip(scored.members, (step, 4), strict=True)
    )
    why = "the effective sample size is too small"
    group = kit.training_group(scored, [late, fresh]).within_staleness(4, config)
    assert isinstance(group, GroupWithHistory)
    assert is_late(late, 4, config)
    group = replace(group, late_refused=why).within_staleness(4, config)
    assert isinstance(group, GroupWithHistory)
    assert [s.trajectory for s in group.sequences] == [fresh.trajectory]
    refused = replace(kit.training_group(scored, [late]), late_refused=why).within_staleness(4, config)
    assert isinstance(refused, Refusal)
    assert refused.reason == "stale"
    assert refused.detail == (
        "all 3 tokens are more than 2 steps old at step 4 or of a later version; the effective sample size is too small"
    )


def test_late_runs_need_a_correction() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.late"):
        check_trainer(with_values(TrainerConfig(), LATE | {"loss.importance_sampling": "none"}))


@pytest.mark.parametrize("least", [0.0, 1.0])
async def test_what_arrives_late_trains_late_or_is_discarded_as_stale(training: kit.Training, least: float) -> None:
    """The logprobs that the kit makes up are no model's: the weights of late sequences differ."""
    settings = {"late": "sequence_truncate", "late_min_ess": least, "max_staleness": 0, "groups_per_step": 1}
    async with training(**settings) as broker:
        await kit.publish_group(broker, "fresh", [0.0, 1.0], seed=1)
        await steps_reach(broker, 1)
        await kit.publish_group(broker, "late", [0.0, 1.0, 0.3], seed=2)
        await kit.publish_group(broker, "next", [0.0, 1.0], seed=3, step=1)
        events = await steps_reach(broker, 2)
        if least:
            assert [e.groups for e in events] == [("fresh",), ("next",)]
            (discarded,) = await discards(broker)
            assert (discarded.group, discarded.reason) == ("late", "stale")
            assert "the effective sample size of 3 late sequences is" in discarded.detail
        else:
            assert [e.groups for e in events[:2]] == [("fresh",), ("late",)]
            assert events[1].metrics["late_sequences"] == 3
            assert 1 <= events[1].metrics["late_ess"] <= 3
            assert "late_sequences" not in events[0].metrics
