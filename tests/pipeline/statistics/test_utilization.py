"""What bounds the speed."""

import pytest

from pipeline.statistics.utilization import bound_by


@pytest.mark.parametrize(
    ("sampling", "training", "word"),
    [(0.95, 0.5, "sampling"), (0.5, 0.95, "training"), (0.95, 0.99, "training"), (0.5, 0.7, "agents")],
)
def test_the_busier_one_bounds_the_speed(sampling: float, training: float, word: str) -> None:
    assert bound_by(sampling, training) == word
