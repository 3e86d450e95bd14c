"""Models, and helpers of programs."""

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from .kit import art, part


class Settings(BaseModel):
    turns: int = 3


def test_a_prompted_model() -> None:
    address = {"inference_api_key": "k", "inference_base_url": "http://127.0.0.1:9/v1"}
    model = art.Model(name="gpt", project="p", **address)
    assert (model.name, model.project, model.trainable, model.config) == ("gpt", "p", False, None)
    assert model.get_inference_name() == "gpt"
    assert asyncio.run(model.get_step()) == 0
    client = model.openai_client()
    assert (str(client.base_url).rstrip("/"), client.api_key) == ("http://127.0.0.1:9/v1", "k")
    assert model.openai_client() is client
    other = art.Model(name="gpt", project="p", inference_model_name="vendor/gpt", **address)
    assert (other.get_inference_name(), other.get_inference_name(3)) == ("vendor/gpt", "vendor/gpt@3")
    with pytest.raises(ValueError, match="inference"):
        art.Model(name="a", project="p").openai_client()


def test_a_trainable_model() -> None:
    model = art.TrainableModel(name="a", project="p", base_model="b", config=Settings(turns=5))
    assert (model.name, model.base_model, model.trainable, model.base_path) == ("a", "b", True, ".art")
    assert (model.get_inference_name(), model.get_inference_name(4)) == ("a", "a@4")
    assert isinstance(model, art.Model)
    assert model.config.turns == 5
    dumped = model.model_dump()
    assert [dumped[k] for k in ("name", "project", "base_model", "trainable")] == ["a", "p", "b", True]
    for method in (model.openai_client, model.backend):
        with pytest.raises(ValueError, match="register"):
            method()


def test_state_is_kept_and_merged(tmp_path: Path) -> None:
    def model() -> Any:
        return art.TrainableModel(name="a", project="p", base_model="b", base_path=str(tmp_path))

    assert model().read_state() is None
    model().merge_state({"a": {"b": 1}})
    assert model().merge_state({"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert model().read_state() == {"a": {"b": 1, "c": 2}}
    assert json.loads((tmp_path / "p" / "models" / "a" / "state.json").read_text()) == model().read_state()


def test_rows_of_the_history_have_the_names_and_means_of_art(tmp_path: Path) -> None:
    model = art.Model(
        name="m", project="p", base_path=str(tmp_path), inference_api_key="k", inference_base_url="http://x/v1"
    )
    won = {"won": True, "reward": 5, "costs/search": 0.5}
    pair = [art.Trajectory(reward=1, metrics=won), art.Trajectory(reward=0, metrics={"won": False})]
    group = art.TrajectoryGroup([*pair, ValueError("x")], metrics={"won": 9}, metadata={"scenario_id": "s"})

    async def log() -> None:
        await model.log([group, art.TrajectoryGroup([art.Trajectory(reward=3)])], split="val", step=1)
        await model.log([*pair, ValueError("y")], split="val", step=2)
        await model.log(
            metrics={"loss": 1.0, "val/acc": 2.0, "loss/kl": 3.0, "reward": 7, "none": float("nan")}, step=3
        )
        await model.log([group], metrics={"x": 1.0, "data/step_num_trajectories": 5}, split="train", step=4)
        await model.log([], split="val", step=5)
        await model.log([group], split="discarded", step=6)

    asyncio.run(log())
    rows = []
    for line in (tmp_path / "p" / "models" / "m" / "history.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row.pop("step") == row.pop("training_step")
        skipped = re.compile("data/cum|time/|recorded_at|.*costs/")
        rows.append({k: v for k, v in row.items() if not skipped.match(k)})
    named = {"exception_rate": 1 / 3, "reward": 2.0, "reward_std_dev": 0.5, "won": 0.5, "group_won": 9.0}

    def counted(scenarios: int, trajectories: int, **more: int) -> dict[str, int]:
        numbers = {"scenarios": scenarios, "trajectories": trajectories, "groups_submitted": scenarios, **more}
        return {f"data/step_num_{name}": number for name, number in numbers.items()}

    def of(split: str, metrics: dict[str, float]) -> dict[str, float]:
        return {f"{split}/{name}": value for name, value in metrics.items()}

    assert rows == [
        of("val", named | {"exception_rate": 0.25, "reward": 2.25}) | counted(2, 4),
        of("val", {k: v for k, v in named.items() if k != "group_won"}) | counted(1, 3),
        of("val", {"loss": 1.0, "acc": 2.0, "reward": 7}) | {"loss/kl": 3.0},
        of("train", named | {"x": 1.0}) | counted(1, 5, groups_trainable=1),
        of("val", {"reward_std_dev": 0}) | counted(0, 0),
        of("discarded", named),
    ]


def test_a_coroutine_function_is_tried_again() -> None:
    calls: list[int] = []

    @art.retry(max_attempts=3, delay=0.001)
    async def work(value: int) -> int:
        """What it does."""
        calls.append(value)
        if len(calls) < 3:
            raise ValueError("not yet")
        return value

    assert (asyncio.run(work(7)), calls) == (7, [7, 7, 7])
    assert (work.__name__, work.__doc__) == ("work", "What it does.")


def test_a_function_is_tried_again_after_growing_pauses() -> None:
    times: list[float] = []

    @art.retry(max_attempts=3, delay=0.02, backoff_factor=3.0, exceptions=(ValueError,))
    def work(error: Exception) -> None:
        times.append(time.monotonic())
        raise error

    with pytest.raises(ValueError, match="never"):
        work(ValueError("never"))
    assert times[1] - times[0] >= 0.02
    assert times[2] - times[1] >= 0.06
    with pytest.raises(KeyError):
        work(KeyError("at once"))
    assert len(times) == 4


def steps(length: int, **options: Any) -> list[Any]:
    return list(part("utils").iterate_dataset(list(range(length)), use_tqdm=False, **options))


def test_a_data_set_is_divided_in_the_order_of_art_and_continued_at_a_step() -> None:
    made = steps(5, groups_per_step=2, num_epochs=2)
    assert [(b.step, b.epoch, b.epoch_step, b.items) for b in made] == [
        (0, 0, 0, [2, 1]),
        (1, 0, 1, [0, 4]),
        (2, 0, 2, [3]),
        (3, 1, 0, [2, 3]),
        (4, 1, 1, [4, 0]),
        (5, 1, 2, [1]),
    ]
    assert steps(0) == []
    assert steps(5, groups_per_step=2, num_epochs=2, initial_step=2) == made[2:]
