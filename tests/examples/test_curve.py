"""Learning curves of the examples."""

import json
from pathlib import Path
from typing import Any

from examples.common import curve
from journeywork.statistics import mean_of


def groups(count: int) -> list[dict[str, Any]]:
    return [{"reward": n % 7 / 7, "runs": 8} for n in range(count)]


def test_every_group_is_in_one_point_and_no_point_is_too_small() -> None:
    for count in (1, 30, 59, 60, 200, 1000):
        points = curve.training_points(groups(count))
        assert sum(point["count"] for point in points) == count
        assert points[-1]["runs"] == 8 * count
        assert len(points) <= curve.POINTS
        assert count < curve.GROUPS_A_POINT or min(p["count"] for p in points) >= curve.GROUPS_A_POINT


def test_a_point_is_the_mean_of_the_groups_means() -> None:
    first, second = curve.training_points(groups(60))
    expected = mean_of([g["reward"] for g in groups(60)[:30]])
    assert first == {"runs": 240, "mean": expected.mean, "ci95": [expected.low, expected.high], "count": 30}
    assert second["runs"] == 480


def test_an_interval_without_bounds_is_json() -> None:
    assert json.loads(json.dumps(curve.as_json(mean_of([1.0])), allow_nan=False))["ci95"] == [None, None]


def recorded() -> dict[str, Any]:
    points = curve.training_points(groups(90))
    held = {"mean": 0.5, "ci95": [0.4, 0.6], "count": 20}
    run = {"seed": 0, "training": points, "before": held, "after": held}
    return {"unit": "games", "measure": "score", "runs": [run, run | {"seed": 1}]}


def test_a_picture_is_the_same_each_time_and_shows_every_run() -> None:
    drawn = curve.draw(recorded())
    assert drawn == curve.draw(recorded())
    assert "training games, seed 0" in drawn
    assert "training games, seed 1" in drawn
    assert drawn.count("held-out games") == 1


def test_the_demo_learns_in_every_recorded_run_and_its_picture_shows_it_and_fits_a_phone() -> None:
    folder = Path(curve.__file__).parents[2] / "docs" / "pictures"
    picture, data = (folder / "curve.svg").read_text("utf-8"), json.loads((folder / "curve.json").read_text("utf-8"))
    assert curve.draw(data) == picture, "run `make pictures`"
    assert len({run["seed"] for run in data["runs"]}) >= 2
    assert all(run["difference"]["ci95"][0] > 0.15 for run in data["runs"])
    assert 'width="302.4pt"' in picture[:2000]  # 420 px
