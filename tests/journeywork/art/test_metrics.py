"""Costs, times and counts of a program, in the rows that `model.log` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

import journeywork.art as art
from journeywork.art.metrics import MetricsBuilder, track_api_cost

pytestmark = pytest.mark.anyio

USAGE = {"prompt_tokens": 1000, "completion_tokens": 100, "prompt_tokens_details": {"cached_tokens": 400}}
ANTHROPIC = {"input_tokens": 1000, "output_tokens": 100, "cache_read_input_tokens": 400}


async def test_costs_of_a_judge_and_of_a_gpu_are_in_the_rows_and_summed_over_steps(tmp_path: Path) -> None:
    def model() -> Any:
        made: Any = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
        made._backend = art.LocalBackend(gpu_cost_per_hour_usd=3600.0)  # a dollar a second
        return made

    @track_api_cost(
        source="judge",
        provider="openai",
        model_name="j",
        prompt_price_per_million=1.0,
        completion_price_per_million=2.0,
    )
    async def judge() -> Any:
        return SimpleNamespace(usage=USAGE)

    await judge()  # outside of any context: not counted
    trajectory = art.Trajectory(reward=1.0, metrics={"costs/search": 0.5, "won": 1})
    for step, trained in ((1, model()), (2, model())):  # the second as a later program
        with trained.metrics_builder("train").activate_context() as builder:
            await judge()
            with builder.measure("time/step_actor_s"):
                pass
            builder.add_data(step_actor_tokens=50, scenario_ids=["a", f"b{step}"])
        await trained.log(
            [art.TrajectoryGroup([trajectory] * 2)], split="train", step=step, metrics={"loss": 1.0}
        )
    first, second = map(
        json.loads, (tmp_path / "p" / "models" / "m" / "history.jsonl").read_text().splitlines()
    )
    assert first["costs/train/judge"] == pytest.approx(1200e-6)
    assert first["costs/train"] == pytest.approx(1200e-6)
    assert first["costs/search"] == 1.0
    assert first["costs/gpu"] == first["time/step_wall_s"]
    assert first["costs/all"] == pytest.approx(1200e-6 + 1.0 + first["costs/gpu"])
    assert first["data/step_actor_tokens"] == 50
    assert second["costs/cum/train/judge"] == pytest.approx(2400e-6)
    assert second["data/cum/num_unique_scenarios"] == 3
    assert second["throughput/avg_actor_tok_per_s"] > 0
    assert (first["train/won"], first["train/loss"]) == (1.0, 1.0)
    assert "train/costs/search" not in first


async def test_the_time_of_a_step_with_two_rows_is_in_the_next_step_s_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("journeywork.art.model.time", SimpleNamespace(monotonic=lambda: now))
    model: Any = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
    model._backend = art.LocalBackend()
    for step, at in ((1, 10.0), (1, 15.0), (2, 30.0)):
        now = at
        await model.log(split="train", step=step, metrics={"loss": 1.0})
    rows = map(json.loads, (tmp_path / "p" / "models" / "m" / "history.jsonl").read_text().splitlines())
    assert [row.get("time/step_wall_s") for row in rows] == [10.0, None, 20.0]


@pytest.mark.parametrize(
    ("response", "cost"),
    [
        ({"usage": {"cost": 0.25}}, 0.25),
        (SimpleNamespace(_hidden_params={"response_cost": 0.5}), 0.5),
        ({"usage": USAGE}, (600 * 1 + 400 * 0.1 + 100 * 2) / 1e6),
        ({"usage": ANTHROPIC}, (1000 * 1 + 400 * 0.2 + 100 * 2) / 1e6),
    ],
)
async def test_what_an_answer_cost(response: Any, cost: float) -> None:
    builder = MetricsBuilder("eval")
    builder.register_model_pricing(
        "j",
        prompt_per_million=1,
        completion_per_million=2,
        cached_prompt_per_million=0.1,
        cache_read_per_million=0.2,
    )
    assert builder.add_response_cost("judge", response, provider="x", model_name="j") == pytest.approx(cost)
    assert (await builder.flush())["costs/eval/judge"] == pytest.approx(cost)
    assert await builder.flush() == {}


def test_a_model_without_a_price_has_that_which_litellm_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is imported, in seconds, where no other price is known."""
    prices = {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6}
    monkeypatch.setitem(sys.modules, "litellm", SimpleNamespace(model_cost={"x/j": prices}))  # type: ignore[arg-type]
    builder = MetricsBuilder("train")

    def cost(model_name: str, **prices: float) -> float:
        return builder.add_response_cost(
            "judge", {"usage": USAGE}, provider="x", model_name=model_name, **prices
        )

    assert cost("j") == pytest.approx(1200e-6)
    assert cost("j", completion_price_per_million=20.0) == pytest.approx(3000e-6)
    assert cost("k", prompt_price_per_million=1.0, completion_price_per_million=2.0) == pytest.approx(1200e-6)
    with pytest.raises(ValueError, match="not known: register it"):
        cost("k")


def test_what_is_no_metric_is_refused() -> None:
    builder = MetricsBuilder("train")
    builder.add_cost("a/b", 1.0)
    for name in ("a", "costs/cum/a", "costs/all", "costs/all/x", "costs/a", "costs/a/b/c"):
        with pytest.raises(ValueError, match=r"must be|can't be"):
            builder.add_metric(name, 1.0)
    with pytest.raises(LookupError):
        MetricsBuilder.get_active()


def test_a_safe_dump_does_not_serialize_the_config() -> None:
    class Settings(BaseModel):
        judge: Any = None

    model = art.Model(name="a", project="p", config=Settings(judge=lambda: 1.0))
    dumped = model.safe_model_dump(mode="json")
    assert (dumped["name"], dumped["config"]) == ("a", None)
    assert model.config is not None


def test_metrics_with_a_name_that_is_refused_are_not_added() -> None:
    builder = MetricsBuilder("train")
    builder.add_cost("a", 1)
    for wrong in ({"time/step_wall_s": 1, "costs/all": 2}, {"costs/a": 1, "costs/a/b": 2}):
        with pytest.raises(ValueError, match="costs/a"):
            builder.split_off(wrong)
    assert builder.split_off({"time/step_wall_s": 1, "loss": 2}) == {"loss": 2}
    assert builder._shared.steps["train"] == {"costs/a": 1, "time/step_wall_s": 1}


async def test_a_corrected_log_counts_nothing_twice(tmp_path: Path) -> None:
    model: Any = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
    wrong = [art.Trajectory(reward=1.0, metrics={"costs/search": 0.5, "costs/all": 2})]
    with pytest.raises(ValueError, match="costs/all"):
        await model.log(wrong, split="train", step=1, metrics={"costs/own": 1.0})
    right = [art.Trajectory(reward=1.0, metrics={"costs/search": 0.5})]
    await model.log(right, split="train", step=1, metrics={"costs/own": 1.0})
    folder = tmp_path / "p" / "models" / "m"
    (row,) = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    assert (row["costs/own"], row["costs/search"], row["data/step_num_trajectories"]) == (1.0, 0.5, 1)
    assert len([*folder.glob("trajectories/train/*")]) == 1
