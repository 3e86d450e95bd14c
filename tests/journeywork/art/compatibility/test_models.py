"""Models, the trajectories of their calls, and helpers of programs."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, ValidationError

from .kit import TOOL, Served, art, part, served, user

__all__ = ["served"]  # a fixture


def capture(work: Callable[[], Any]) -> Any:
    return asyncio.run(art.capture_auto_trajectory(work()))


def test_the_calls_of_a_coroutine_become_a_trajectory(served: Served) -> None:
    async def work() -> None:
        async with AsyncOpenAI(base_url=served.url, api_key="k") as client:
            messages: list[Any] = [user("a")]
            for text in ("b", "c"):
                reply = await client.chat.completions.create(model="m", messages=messages)
                messages += [{"role": "assistant", "content": reply.choices[0].message.content}, user(text)]
            art.auto_trajectory(required=True).reward = 3

    made = capture(work)
    assert made.messages() == [
        user("a"), {"role": "assistant", "content": "after 1"}, user("b"), {"role": "assistant", "content": "after 3"}
    ]  # fmt: skip
    assert [isinstance(item, Choice) for item in made.messages_and_choices] == [False, True, False, True]
    assert (made.reward, made.additional_histories) == (3, [])
    assert "duration" in made.metrics


def test_a_streamed_call_beside_the_conversation_becomes_an_additional_history(served: Served) -> None:
    async def work() -> None:
        async with AsyncOpenAI(base_url=served.url, api_key="k") as client:
            tools: Any = [TOOL]
            await client.chat.completions.create(model="m", messages=[user("a")], tools=tools)
            async for _ in await client.chat.completions.create(model="m", messages=[user("b")], stream=True):
                pass

    made = capture(work)
    assert (made.messages(), made.tools) == ([user("a"), {"role": "assistant", "content": "after 1"}], [TOOL])
    (history,) = made.additional_histories
    assert history.messages() == [user("b"), {"role": "assistant", "content": "after 1"}]


def test_calls_of_a_blocking_client_are_captured(served: Served) -> None:
    def call() -> None:
        with OpenAI(base_url=served.url, api_key="k") as client:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])

    async def work() -> None:
        await asyncio.to_thread(call)

    assert capture(work).messages() == [user("a"), {"role": "assistant", "content": "after 1"}]


def test_a_coroutine_without_calls_has_an_empty_trajectory() -> None:
    async def work() -> None:
        pass

    assert capture(work).messages_and_choices == []
    assert art.auto_trajectory() is None  # outside
    with pytest.raises(RuntimeError):
        art.auto_trajectory(required=True)


def test_captures_at_the_same_time_do_not_mix(served: Served) -> None:
    async def work(text: str) -> None:
        async with AsyncOpenAI(base_url=served.url, api_key="k") as client:
            await client.chat.completions.create(model="m", messages=[user(text)])

    async def run() -> Any:
        return await asyncio.gather(*(art.capture_auto_trajectory(work(t)) for t in "abc"))

    assert [made.messages()[0]["content"] for made in asyncio.run(run())] == ["a", "b", "c"]


def test_a_trajectory_can_be_handed_over() -> None:
    async def work() -> str:
        art.yield_trajectory(art.Trajectory(reward=1))
        art.yield_trajectory(art.Trajectory(reward=2))
        return "something else"

    async def nothing() -> None:
        pass

    art.yield_trajectory(art.Trajectory())  # to nobody
    assert asyncio.run(art.capture_yielded_trajectory(work())).reward == 2
    with pytest.raises(RuntimeError):
        asyncio.run(art.capture_yielded_trajectory(nothing()))


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
    assert model.litellm_completion_params() == {
        "model": "gpt", "base_url": "http://127.0.0.1:9/v1", "api_key": "k", "temperature": 1
    }  # fmt: skip
    other = art.Model(name="gpt", project="p", inference_model_name="vendor/gpt", **address)
    assert (other.get_inference_name(), other.get_inference_name(3)) == ("vendor/gpt", "vendor/gpt@3")
    with pytest.raises(ValueError, match="inference"):
        art.Model(name="a", project="p").openai_client()


def test_a_trainable_model() -> None:
    model = art.TrainableModel(name="a", project="p", base_model="b", config=Settings(turns=5))
    assert (model.name, model.base_model, model.trainable, model.base_path) == ("a", "b", True, ".art")
    assert (model.get_inference_name(), model.get_inference_name(4)) == ("a", "a@4")
    assert model.litellm_completion_params()["model"] == "hosted_vllm/a"
    assert isinstance(model, art.Model)
    assert model.config.turns == 5
    assert model.safe_model_dump()["config"] is None
    dumped = model.model_dump()
    assert [dumped[k] for k in ("name", "project", "base_model", "trainable")] == ["a", "p", "b", True]
    for method in (model.openai_client, model.backend):
        with pytest.raises(ValueError, match="register"):
            method()


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("Model", {"name": "a"}),
        ("Model", {"project": "p"}),
        ("TrainableModel", {"name": "a", "project": "p"}),
    ],
)
def test_a_model_has_required_arguments(kind: str, arguments: dict[str, str]) -> None:
    with pytest.raises(TypeError):
        getattr(art, kind)(**arguments)


def test_state_is_kept_and_merged(tmp_path: Path) -> None:
    def model() -> Any:
        return art.TrainableModel(name="a", project="p", base_model="b", base_path=str(tmp_path))

    assert model().read_state() is None
    model().merge_state({"a": {"b": 1}})
    assert model().merge_state({"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    assert model().read_state() == {"a": {"b": 1, "c": 2}}
    model().overwrite_state({"z": 1})
    assert model().read_state() == {"z": 1}
    assert json.loads((tmp_path / "p" / "models" / "a" / "state.json").read_text()) == {"z": 1}


def test_rows_of_the_history_have_the_names_and_means_of_art(tmp_path: Path) -> None:
    model = art.Model(
        name="m",
        project="p",
        base_path=str(tmp_path),
        inference_api_key="k",
        inference_base_url="http://x/v1",
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
        numbers = {
            "scenarios": scenarios,
            "trajectories": trajectories,
            "groups_submitted": scenarios,
            **more,
        }
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


def test_configurations_and_results_have_defaults() -> None:
    config, sft = art.TrainConfig(), art.TrainSFTConfig()
    assert (config.learning_rate, config.kl_penalty_coef, config.grad_accumulation_sequences) == (
        5e-6,
        0.0,
        None,
    )
    assert (sft.learning_rate, sft.batch_size) == (5e-5, "auto")
    assert (art.TrainResult(step=1).metrics, art.LocalTrainResult(step=1).checkpoint_path) == ({}, None)
    assert art.ServerlessTrainResult(step=3).artifact_name is None
    with pytest.raises(ValidationError):
        art.TrainConfig(grad_accumulation_sequences=0)


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


def test_a_function_is_tried_again_after_growing_pauses_and_tells_of_it() -> None:
    told: list[tuple[str, int]] = []
    times: list[float] = []

    @art.retry(
        max_attempts=3, delay=0.02, backoff_factor=3.0, exceptions=(ValueError,),
        on_retry=lambda error, attempt: told.append((str(error), attempt)),
    )  # fmt: skip
    def work(error: Exception) -> None:
        times.append(time.monotonic())
        raise error

    with pytest.raises(ValueError, match="never"):
        work(ValueError("never"))
    assert told == [("never", 1), ("never", 2)]
    assert times[1] - times[0] >= 0.02
    assert times[2] - times[1] >= 0.06
    with pytest.raises(KeyError):
        work(KeyError("at once"))
    assert len(times) == 4


def steps(length: int, **options: Any) -> list[Any]:
    return list(part("utils").iterate_dataset(list(range(length)), use_tqdm=False, **options))


def test_a_prompted_model_is_called(served: Served) -> None:
    model = art.Model(name="gpt", project="p", inference_api_key="key", inference_base_url=served.url)

    async def rollout() -> Any:
        made = art.Trajectory(messages_and_choices=[user("a")])
        client = model.openai_client()
        reply = await client.chat.completions.create(
            model=model.get_inference_name(), messages=made.messages()
        )
        await client.close()
        made.messages_and_choices.append(reply.choices[0])
        return made

    assert asyncio.run(rollout()).messages()[1]["content"] == "after 1"
    headers, body = served.requests[0]
    assert (headers["authorization"], body["model"]) == ("Bearer key", "gpt")


def test_a_data_set_is_divided_in_the_order_of_art_and_continued_at_a_step() -> None:
    made = steps(5, groups_per_step=2, num_epochs=2)
    assert [(b.step, b.epoch, b.epoch_step, b.items) for b in made] == [
        (0, 0, 0, [2, 1]), (1, 0, 1, [0, 4]), (2, 0, 2, [3]), (3, 1, 0, [2, 3]), (4, 1, 1, [4, 0]), (5, 1, 2, [1])
    ]  # fmt: skip
    assert steps(0) == []
    assert steps(5, groups_per_step=2, num_epochs=2, initial_step=2) == made[2:]


def test_fine_tuning_on_a_file_has_the_options_of_art() -> None:
    found = inspect.signature(part("utils.sft").train_sft_from_file).parameters
    assert [(name, p.default) for name, p in found.items() if p.default is not p.empty] == [
        ("epochs", 1), ("batch_size", 2), ("peak_lr", 2e-4), ("schedule_type", "linear"), ("warmup_ratio", 0.1),
        ("initial_step", 0), ("final_step", None), ("_config", None), ("verbose", False),
        ("shuffle_buffer_size", 10000),
    ]  # fmt: skip
    assert list(found)[:2] == ["model", "file_path"]


def test_a_file_that_is_not_there_is_not_fine_tuned_on(tmp_path: Path) -> None:
    model = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
    with pytest.raises(FileNotFoundError):
        asyncio.run(part("utils.sft").train_sft_from_file(model, str(tmp_path / "none.jsonl")))


def test_a_model_that_was_never_trained_is_at_step_0(tmp_path: Path) -> None:
    model = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
    assert part("utils").get_model_step(model, str(tmp_path)) == 0


@pytest.mark.parametrize(
    ("limit", "options", "expected"), [(2, {}, 2), (1, {"derive_key": lambda n: str(n % 3)}, 3)]
)
def test_concurrency_is_limited_in_all_or_for_each_key(
    limit: int, options: dict[str, Any], expected: int
) -> None:
    inside = most = 0

    @part("utils").limit_concurrency(limit, **options)
    async def work(value: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.005)
        inside -= 1
        return value

    async def run() -> list[int]:
        return list(await asyncio.gather(*(work(n) for n in range(6))))

    assert asyncio.run(run()) == list(range(6))
    assert most == expected
