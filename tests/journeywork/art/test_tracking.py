"""`model.log` sends its rows to Weights & Biases where WANDB_API_KEY is set."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import journeywork.art as art

pytestmark = pytest.mark.anyio


class FakeWandb:
    """What `model.log` uses of wandb. It is its own run."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.axes: dict[str, str | None] = {}
        self.config = SimpleNamespace(update=lambda values, **_: self.begun[-1].update(config=values))

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
    policy.update_wandb_config({"a": {"b": 1}})
    await policy.log(metrics={"loss/train": 0.5}, step=3)
    await policy.log(metrics={"val/reward": 1.0}, step=2)
    (begun,) = wandb.begun
    assert (begun["project"], begun["name"], begun["id"], begun["resume"]) == ("p", "m", "m", "allow")
    assert begun["config"] == {"a": {"b": 1}}
    assert wandb.rows == [{"training_step": 3, "loss/train": 0.5}, {"training_step": 2, "val/reward": 1.0}]
    assert wandb.axes["val/*"] == "training_step"
    policy.update_wandb_config({"a": {"c": 2}})
    assert wandb.begun[0]["config"] == {"a": {"b": 1, "c": 2}}


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


async def test_a_run_that_the_program_puts_into_the_model_gets_the_rows(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ART's programs do that begin their run themselves."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    policy, own = model(tmp_path), FakeWandb()
    policy.update_wandb_config({"a": 1})
    own.begun.append({})
    policy._wandb_run = own
    await policy.log(metrics={"x": 1.0}, step=1)
    assert own.rows == [{"training_step": 1, "val/x": 1.0}]
    assert policy._get_wandb_run() is own
    assert own.begun == [{"config": {"a": 1}}]
    assert own.axes["val/*"] == "training_step"
