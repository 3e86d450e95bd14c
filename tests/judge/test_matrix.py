"""Three judges that die and are stopped while they share one log."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import NatsConfig
from tests.judge.matrix import Plan, play

pytestmark = pytest.mark.anyio


@pytest.mark.timeout(600)
@pytest.mark.slow
async def test_three_judges_that_are_killed_and_stopped_score_each_group_once(
    nats_config: NatsConfig, tmp_path: Path
) -> None:
    plan = Plan(groups=100, kills=9, groups_a_process=3, stops=1, stop_s=2.5, ack_wait_s=1.0, timeout_s=10.0)
    report = await play(nats_config, tmp_path, plan)
    assert report["scored_once"] > plan.groups / 2
    assert report["kills"] > 0
    assert report["least_calls_of_a_group"] >= plan.passes  # none was scored without the judge model
