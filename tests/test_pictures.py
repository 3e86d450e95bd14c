"""The pictures of README and docs/ are what their command draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs import make_pictures
from examples.common import curve

README = Path(__file__).parent.parent / "README.md"


def test_the_curve_is_drawn_from_its_recorded_data() -> None:
    data = json.loads((make_pictures.FOLDER / "curve.json").read_text("utf-8"))
    assert curve.draw(data) == (make_pictures.FOLDER / "curve.svg").read_text("utf-8"), "run `make pictures`"
    (run,) = data["runs"]
    for point in run["training"]:
        low, high = point["ci95"]
        assert low <= point["mean"] <= high
    assert run["before"]["count"] == run["after"]["count"]


@pytest.mark.parametrize(
    "options",
    [["curve", "--check", "--run-dir", "r"], ["dashboard", "--check"]],
    ids=" ".join,
)
def test_options_that_contradict_each_other_write_nothing(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_pictures, "FOLDER", tmp_path)
    monkeypatch.setattr(make_pictures, "read_curve", lambda _: {})
    monkeypatch.setattr(make_pictures, "shoot_dashboard", lambda _: [])
    monkeypatch.setattr("sys.argv", ["make_pictures", *options])
    with pytest.raises(SystemExit) as ended:
        make_pictures.main()
    assert ended.value.code == 2
    assert not list(tmp_path.iterdir())


def test_the_curve_fits_a_phone() -> None:
    head = (make_pictures.FOLDER / "curve.svg").read_text("utf-8")[:2000]
    assert 'width="302.4pt"' in head  # 420 px
