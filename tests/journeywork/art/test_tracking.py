"""Rows of `model.log`: what the program measured is in them, and they go to Weights & Biases where its key is set."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import journeywork.art as art


class FakeWandb:
    """What `model.log` uses of wandb. It is its own run."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str | None] = {}

    def init(self, **options: Any) -> FakeWandb:
        self.begun.append(options)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, row: dict[str, float]) -> None:
        self.rows.append({name: value for name, value in row.items() if name != "time/wall_clock_sec"})


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    found = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", found)  # type: ignore[arg-type]
    monkeypatch.setenv("WANDB_API_KEY", "k")
    return found


def model(path: object, **options: Any) -> art.Model[None]:
    return art.Model(name="m", project="p", base_path=str(path), **options)


async def test_rows_go_to_one_run_by_their_step(wandb: FakeWandb, tmp_path: object) -> None:
    policy = model(tmp_path)
    await policy.log(metrics={"loss/train": 0.5}, step=3)
    await policy.log(metrics={"val/reward": 1.0}, step=2)
    (begun,) = wandb.begun
    assert (begun["project"], begun["name"], begun["id"], begun["resume"]) == ("p", "m", "m", "allow")
    assert wandb.rows == [{"training_step": 3, "loss/train": 0.5}, {"training_step": 2, "val/reward": 1.0}]
    assert wandb.axes["val/*"] == "training_step"
    assert policy._get_wandb_run() is wandb


@pytest.mark.parametrize(("key", "reports"), [("", None), ("k", [])])
async def test_without_a_key_or_a_wish_nothing_is_sent(
    wandb: FakeWandb, tmp_path: object, monkeypatch: pytest.MonkeyPatch, key: str, reports: list[str] | None
) -> None:
    if not key:
        monkeypatch.delenv("WANDB_API_KEY")
    await model(tmp_path, report_metrics=reports).log(metrics={"x": 1.0}, step=1)
    assert wandb.begun == []


async def test_an_error_of_the_tracker_is_a_warning(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("WANDB_API_KEY", "k")
    await model(tmp_path).log(metrics={"x": 1.0}, step=1)
    assert "the metrics of step 1 are not at Weights & Biases" in caplog.text


async def test_what_a_program_measured_is_in_the_next_row_of_its_split(tmp_path: Path) -> None:
    policy = model(tmp_path)
    for context in ("train", "eval"):
        builder = policy.metrics_builder(context)
        with builder.activate_context(), builder.measure(f"time/step_{context}_s"):
            builder.add_data(step_actor_tokens=3)
            builder.add_data(step_actor_tokens=4)
    for split, step in (("val", 1), ("train", 2), ("train", 3)):
        await policy.log(metrics={"x": 1.0}, split=split, step=step)
    rows = map(json.loads, (tmp_path / "p" / "models" / "m" / "history.jsonl").read_text().splitlines())
    measured = [{n for n in row if n.startswith(("data/", "time/step"))} for row in rows]
    assert measured == [
        {"data/step_actor_tokens", "time/step_eval_s"},
        {"data/step_actor_tokens", "time/step_train_s"},
        set(),
    ]
    assert '"data/step_actor_tokens": 7' in (tmp_path / "p" / "models" / "m" / "history.jsonl").read_text()
