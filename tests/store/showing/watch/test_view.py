"""The terminal view: its figures, and its lines at any size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import anyio
import pytest
from rich.text import Text

from pipeline.config import NatsConfig
from pipeline.events import GroupDiscarded
from pipeline.log.broker import Broker
from store.reading.history import History
from store.showing.watch.snapshot import Model, Snapshot, log_lag, take_snapshot
from store.showing.watch.view import chart, lines, plain
from tests.store.showing.watch.kit import REPLICA, events, make_run

SIZES = [(80, 24), (200, 50), (40, 10), (20, 5), (132, 43)]


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    history = History(make_run(tmp_path, events()))
    try:
        return take_snapshot(history, {"judge": 3, "store": 1_200, "telemetry": 7})
    finally:
        history.close()


def text(shown: list[Text]) -> str:
    return "\n".join(line.plain for line in shown)


def test_the_figures_are_those_of_the_events(snapshot: Snapshot) -> None:
    assert snapshot.running
    assert snapshot.runs_per_s == 2.0
    assert snapshot.calls_per_s == 0.1
    assert (snapshot.open_runs, snapshot.open_groups) == (3, 1)
    assert (snapshot.dead_letters, snapshot.judge_usd) == (1, 0.25)
    (model,) = snapshot.models
    assert (model.version, model.step, len(model.rewards), model.rewards[-1]) == ("m@30", 30, 30, 1.0)
    assert snapshot.replicas == ((REPLICA, "m@30"),)
    assert [a["title"] for a in snapshot.alarms] == ["Rise of KL"]


def test_an_empty_run_has_a_view(tmp_path: Path) -> None:
    history = History(make_run(tmp_path, [], pid=2**22 + 1))
    empty = take_snapshot(history, None)
    history.close()
    assert not empty.running
    shown = text(lines(empty, 80, 24))
    for part in (
        "not running",
        "m@0",
        "no step yet",
        "the log does not answer",
        f"{REPLICA} base model",
        "no alarms",
    ):
        assert part in shown


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits_the_terminal(snapshot: Snapshot, width: int, height: int) -> None:
    many = dataclasses.replace(
        snapshot, models=snapshot.models * 7, alarms=snapshot.alarms * 9, replicas=snapshot.replicas * 12
    )
    for one in (snapshot, many):
        shown = lines(one, width, height)
        assert len(shown) == height
        assert all(line.cell_len <= width for line in shown)


@pytest.mark.parametrize(("width", "height"), SIZES[:2])
def test_it_shows_what_matters(snapshot: Snapshot, width: int, height: int) -> None:
    shown = text(lines(snapshot, width, height))
    for part in (
        "gateway ready", "rollouts/s 2.00", "open groups 1", "judge cost $0.25", "dead letters 1", "store 1,200",
        "m@30 reward 1.000  staleness 0.25", "█", "1.000 ", "0.033 ", f"{REPLICA} m@30",
        "! Rise of KL of m: it is far", "dashboard http://127.0.0.1:8701",
    ):  # fmt: skip
        assert part in shown
    assert "telemetry 7" not in shown, "it was not started"
    assert ("trainer.loss.beta" in shown) == (width == 200), "what to do stands where there is room"


def test_the_plain_line_says_the_same(snapshot: Snapshot) -> None:
    line = plain(snapshot)
    assert "\n" not in line
    for part in (
        "runs/s 2.00",
        "open groups 1",
        "m@30 reward 1.000 staleness 0.25",
        "dead letters 1",
        "ALARM Rise",
    ):
        assert part in line
    assert plain(dataclasses.replace(snapshot, alarms=())).endswith("no alarms")


def test_a_chart_rises_with_its_values() -> None:
    top, bottom = chart([0.0, 1.0, 2.0, 3.0], 10, 2)
    assert top == "   3.000   ▃█"
    assert bottom == "   0.000 ▁▆██"
    assert chart([1.0], 10, 1) == ["   1.000 ▁"]
    (row,) = chart(list(range(1000)), 8, 1)
    assert row == " 937.000 ▁▂▃▄▅▆▇█"
    assert chart([], 10, 3) == ["  no step yet", "", ""]


def test_many_models_share_the_height(snapshot: Snapshot) -> None:
    other = Model("other", 2, "other@2", {}, (0.0, 1.0))
    two = dataclasses.replace(snapshot, models=(*snapshot.models, other))
    shown = text(lines(two, 80, 24))
    assert "m@30" in shown
    assert "other@2" in shown
    assert shown.count("1.000 ") >= 2


@pytest.mark.anyio
async def test_a_timer_is_counted_once(nats_config: NatsConfig) -> None:
    group = GroupDiscarded(project="p", group="g", model="m", trajectories=(), reason="late", by="judge")
    async with Broker.connect(nats_config) as broker:
        await broker.set_timer(group, at=0)
        while not (waiting := await broker.lag("judge-timers")):
            await anyio.sleep(0.02)  # the server delivers it when it likes
        assert (await log_lag(broker))["judge"] == waiting
        assert await broker.lag("judge", exact=True) == 0
