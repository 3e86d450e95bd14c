"""Groups from files, and agreement with known rewards."""

from pathlib import Path

import pytest

from judge.labelled import measure_agreement, read_labelled
from pipeline.config import ConfigError


@pytest.mark.parametrize(
    ("truth", "scores", "tau", "pairwise", "flips"),
    [
        ([0, 1, 2, 3], [0.1, 0.2, 0.3, 0.4], 1.0, 1.0, 0.0),
        ([0, 1, 2, 3], [0.4, 0.3, 0.2, 0.1], -1.0, 0.0, 1.0),
        ([0, 1, 2, 3], [0.5, 0.5, 0.5, 0.5], 0.0, 0.5, 0.0),
        ([0, 0, 1, 1], [0.1, 0.2, 0.9, 0.8], 4 / (4 * 6) ** 0.5, 1.0, 0.0),
        ([1, 1, 1, 1], [0.1, 0.2, 0.9, 0.8], None, None, None),
        ([0, 1], [1.0, 0.0], -1.0, 0.0, 1.0),
    ],
)
def test_agreement(
    truth: list[float], scores: list[float], tau: float | None, pairwise: float | None, flips: float | None
) -> None:
    found = measure_agreement([(dict(zip("abcd", truth, strict=False)), dict(zip("abcd", scores, strict=False)))])
    assert [found.kendall_tau, found.pairwise_accuracy, found.sign_flips] == [
        pytest.approx(figure) for figure in (tau, pairwise, flips)
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "there is no group in it"),
        ("{", "x.jsonl:1"),
        ('{"trajectories": []}', "at least 2"),
        ('{"trajectories": [{"messages": [], "reward": 1}, {"messages": []}]}', "reward"),
    ],
)
def test_a_labelled_file_that_can_t_be_used_says_where(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_labelled(tmp_path / "x.jsonl")
