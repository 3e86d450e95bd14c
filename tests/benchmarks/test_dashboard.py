"""The dashboard's benchmark: each of its pages is shown over the history that it makes."""

from pathlib import Path

import pytest

from benchmarks.dashboard import measure
from benchmarks.history import make_history


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_page_is_shown(tmp_path: Path) -> None:
    make_history(tmp_path, 1_600)
    report = measure(tmp_path, 1_600)
    assert all(seconds["first"] > 0 for seconds in report["pages"].values())
