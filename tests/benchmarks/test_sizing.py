"""The model behind docs/sizing.md."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.sizing import DAY_S, Load, Measured, inputs, size, tables

PAGE = Path(__file__).parents[2] / "docs" / "sizing.md"


def test_the_page_has_the_tables_of_the_model() -> None:
    page = PAGE.read_text("utf-8")
    assert tables() in page, "run `python -m benchmarks.sizing`"
    assert inputs() in page, "run `python -m benchmarks.sizing`"


def test_a_load_by_hand() -> None:
    measured = dataclasses.replace(
        Measured(), calls_per_core_s=100.0, turn_bytes=1000.0, subject_bytes=500.0, resident=2.0
    )
    found = size(Load("one a second", DAY_S, turns=10, peak=2.0, log_age_s=3600.0), measured)
    assert found.calls_s == pytest.approx(20.0)
    assert found.gateway_cores == pytest.approx(0.2)
    assert found.log_bytes == pytest.approx(3600 * 10 * 1000)
    assert found.subjects == pytest.approx(3 * 3600)
    assert found.server_memory == pytest.approx(3 * 3600 * 1000)


def test_agents_that_are_always_at_work_make_a_turn_each_ten_seconds() -> None:
    load = Load.of_agents(1000)
    assert load.trajectories_day * load.turns / DAY_S == pytest.approx(100.0)
