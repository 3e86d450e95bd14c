"""Helpers of programs: what is counted while they play, what servers of tools list, chunks of a data set."""

from typing import Any

import pytest

import journeywork.art as art
from journeywork.art.utils.sft import create_sft_dataset_iterator


def test_the_chunks_of_a_data_set_share_one_schedule() -> None:
    """As in openpipe-art 0.5.18: 7 trajectories, 4 batches an epoch, chunks of 3 batches."""
    trajectories = [art.Trajectory(reward=float(i)) for i in range(7)]
    options: dict[str, Any] = {"chunk_size": 3, "epochs": 2, "warmup_ratio": 0.25, "peak_lr": 1.0}
    chunks = list(create_sft_dataset_iterator(trajectories, **options))
    assert [(c.step, c.epoch, c.epoch_step, len(c.trajectories)) for c in chunks] == [
        (0, 0, 0, 6),
        (3, 0, 3, 1),
        (4, 1, 0, 6),
        (7, 1, 3, 1),
    ]
    rates = [rate for c in chunks for rate in c.config.learning_rate]  # type: ignore[union-attr]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    for epoch in (chunks[:2], chunks[2:]):
        assert sorted(t.reward for c in epoch for t in c.trajectories) == list(range(7))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 0}, "must be at least 1, not 10, 0 and 2"),
        ({"peak_lr": float("nan")}, "peak_lr must be above 0"),
        ({"warmup_ratio": 1.0}, "warmup_ratio from 0 to below 1"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(create_sft_dataset_iterator([], **options))
