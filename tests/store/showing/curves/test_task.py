"""Curves of a run: a point per step, once, also after kills."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from pipeline.config import Config, NatsConfig
from pipeline.log.broker import Broker
from pipeline.log.messages import LogEntry
from pipeline.statistics.metric_names import ALIASES, named
from store.showing.curves.metrics_file import NAME, MetricsFile
from store.showing.curves.rows import Row, make_row
from store.showing.curves.task import Curves
from tests.store.showing.curves.kit import checkpoint, evaluation

pytestmark = pytest.mark.anyio


def lines(folder: Path) -> list[dict[str, object]]:
    path = folder / "curves" / NAME
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def run_until(config: Config, done: Callable[[], bool]) -> None:
    """Run the task as after a start of the service, until `done`; then cancel it."""
    async with Broker.connect(config.nats) as broker, anyio.create_task_group() as tg:
        tg.start_soon(Curves(config, broker).run)
        with anyio.fail_after(60):
            while not done():
                await anyio.sleep(0.02)
        tg.cancel_scope.cancel()


async def test_each_step_is_one_point_through_restarts(nats_config: NatsConfig, tmp_path: Path) -> None:
    config = Config(project="p", run_dir=str(tmp_path), nats=nats_config)
    for last in (3, 5):
        async with Broker.connect(nats_config) as broker:
            for step in range(last - 2, last + 1):
                await broker.publish(checkpoint(step))  # step 3 twice: the broker refuses the second
        await run_until(config, lambda wanted=last: len(lines(tmp_path)) >= wanted)
    assert [row["step"] for row in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert lines(tmp_path)[0]["metrics"] == {
        "trainer/loss": 0.5,
        "loss/train": 0.5,
        "trainer/reward_mean_all": 0.1,
        "train/reward": 0.1,
        "trainer/kl_sampler": 0.001,
    }


@pytest.mark.parametrize("cut", [1, 40, 200])
async def test_a_line_that_a_kill_cut_off_is_written_again(
    broker: Broker, nats_config: NatsConfig, tmp_path: Path, cut: int
) -> None:
    config = Config(project="p", run_dir=str(tmp_path), nats=nats_config)
    for step in (1, 2, 3):
        await broker.publish(checkpoint(step))
    await run_until(config, lambda: len(lines(tmp_path)) >= 3)
    before = lines(tmp_path)
    file = tmp_path / "curves" / NAME
    file.write_bytes(file.read_bytes()[:-cut])
    await run_until(config, lambda: file.read_bytes().count(b"\n") >= 3)
    assert lines(tmp_path) == before


async def test_evaluations_of_versions_are_points_at_their_step(
    broker: Broker, nats_config: NatsConfig, tmp_path: Path
) -> None:
    config = Config(project="p", run_dir=str(tmp_path), nats=nats_config)
    for event in (
        checkpoint(1),
        evaluation("m@1", 0.75),
        evaluation("gpt", 0.5, name="other", kind="external"),
        evaluation("", 0.5, name="moving"),  # the version changed meanwhile
        checkpoint(2),
        evaluation("m@1", 0.5, name="again"),
    ):
        await broker.publish(event)
    await run_until(config, lambda: len(lines(tmp_path)) >= 4)
    found = lines(tmp_path)
    assert [(row["step"], row.get("evaluation")) for row in found] == [(1, None), (1, "e/0"), (2, None), (1, "again/0")]
    assert found[1]["metrics"] == {
        "eval/games.agent.held_out/reward": 0.75,
        "eval/games.agent.held_out/reward_low": 0.5,
        "eval/games.agent.held_out/reward_high": None,
        "eval/games.agent.held_out/failed_runs": 0.0,
        "eval/games.agent.held_out/run_p50_s": None,
    }


def test_a_step_that_was_trained_again_replaces_the_lost_one(tmp_path: Path) -> None:
    rows = [
        Row(model="m", branch="main", step=step, version=f"m@{step}", at=1.0, log_seq=step, log_at=at, metrics={})
        for step, at in ((1, 10), (2, 20), (2, 30))
    ]
    history = MetricsFile(tmp_path)
    assert [history.add(row) for row in (*rows, rows[2])] == [True, True, True, False]
    assert MetricsFile(tmp_path).rows == {rows[0].key: rows[0], rows[2].key: rows[2]}


@pytest.mark.parametrize("version", ["x", "m@" + "9" * 26, "m@01"])
def test_an_evaluation_of_no_version_has_no_curve_and_ends_nothing(version: str) -> None:
    recorded = LogEntry(evaluation(version, 0.5), "POLICY", 1, "s", {"Nats-Time-Stamp": "2026-11-23T00:00:00Z"})
    assert make_row(recorded) is None


def test_agents_metrics_are_curves() -> None:
    """A tracker gets them under ART's names, without characters that trackers refuse."""
    assert named({"run/moves made": 4.0, "kl": 0.5}) == {
        "trainer/run/moves.made": 4.0,
        "train/moves.made": 4.0,
        "trainer/kl": 0.5,
        "loss/kl_div": 0.5,
    }


def test_the_page_names_the_aliases() -> None:
    text = (Path(__file__).parents[4] / "docs" / "dashboard.md").read_text()
    assert [f"| `{ours}` | `{arts}` |" in text for ours, arts in ALIASES.items()] == [True] * len(ALIASES)
