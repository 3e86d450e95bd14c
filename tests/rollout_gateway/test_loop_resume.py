"""`journeywork.looping` on a real log, gateway and inference server: killed in the middle, it loses no scenario."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pipeline.events import TrajectoryCompleted, TrajectoryOpened
from pipeline.log.broker import Broker
from tests.rollout_gateway.conftest import PROJECT, StartGateway
from tests.rollout_gateway.loop_child import CONCURRENCY, GROUP_SIZE, SCENARIOS

pytestmark = pytest.mark.inference


def start(url: str, attempts: int = 1000) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rollout_gateway.loop_child", url, str(attempts)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
async def test_a_killed_loop_plays_every_scenario_exactly_as_often_as_wished(
    start_gateway: StartGateway, broker: Broker
) -> None:
    gateway = start_gateway()
    for lines in (9, 7):  # the loop dies twice, the second time together with the gateway
        child = start(gateway.url, lines)
        assert child.stdout is not None
        with child, child.stdout as told:
            for _ in range(lines):
                assert told.readline() == "played\n"
            child.kill()
    gateway.restart()
    last = start(gateway.url)
    out, _ = last.communicate(timeout=100)
    result = json.loads(out.strip().rpartition("\n")[2])

    wished = len(SCENARIOS) * GROUP_SIZE
    assert result["incomplete"] == []
    assert result["resumed"] + result["played"] == wished
    assert 9 + 7 - 2 * CONCURRENCY <= result["resumed"] < wished
    opened = [r.event for r in await broker.read(TrajectoryOpened, project=PROJECT)]
    ended = [r.event for r in await broker.read(TrajectoryCompleted, project=PROJECT)]
    assert len({event.trajectory for event in opened}) == len(opened) == len(ended)
    tasks = {event.trajectory: event.task for event in opened}
    done = Counter(tasks[event.trajectory] for event in ended if event.outcome == "scored")
    assert done == dict.fromkeys(SCENARIOS, GROUP_SIZE)
    assert all(event.exchanges == 1 for event in ended if event.outcome == "scored")
