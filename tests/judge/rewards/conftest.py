"""Reward functions on a busy machine."""

import pytest

from judge.rewards import sandbox


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that the machine holds up for seconds is not taken for one that hangs."""
    monkeypatch.setattr(sandbox, "_START_S", 200.0)
