"""The public interface of openpipe-art 0.5, as programs use it.

The same file runs against `journeywork.art` and, in an environment of its own, against `art` itself: see docs/art.md.
So it imports nothing of this repository and uses no fixture of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib
import inspect
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from pydantic import BaseModel, ValidationError

NAME = os.environ.get("ART_UNDER_TEST", "journeywork.art")
art: Any = importlib.import_module(NAME)


def part(path: str) -> Any:
    return importlib.import_module(f"{NAME}.{path}")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str | None, **fields: Any) -> Choice:
    message = ChatCompletionMessage(role="assistant", content=text, **fields)
    return Choice(finish_reason="stop", index=0, message=message)


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}


async def played(reward: float, delay_s: float = 0.0, **fields: Any) -> Any:
    await asyncio.sleep(delay_s)
    return art.Trajectory(reward=reward, **fields)


async def failed(message: str = "boom") -> Any:
    raise RuntimeError(message)


def gathered(groups: Any, **options: Any) -> Any:
    async def run() -> Any:
        made = groups() if callable(groups) else groups
        return await art.gather_trajectory_groups(made, **options)

    return asyncio.run(run())


def rewards(group: Any) -> list[float]:
    return sorted(trajectory.reward for trajectory in group)


# -- trajectories --------------------------------------------------------------------------------------------------


def test_a_trajectory_has_defaults_of_its_own() -> None:
    given = [user("x")]
    one, other = art.Trajectory(messages_and_choices=given), art.Trajectory()
    one.metrics["a"] = 1
    one.messages_and_choices.append(said("y"))
    one.log("line")
    assert given == [user("x")]
    assert (other.messages_and_choices, other.reward, other.metrics, other.metadata) == ([], 0.0, {}, {})
    assert (other.logs, other.tools, other.additional_histories) == ([], None, [])
    assert (other.initial_policy_version, other.final_policy_version) == (None, None)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("metadata", [{"a": value} for value in ("text", 3, 2.5, True, None)], {"a": [1]}),
        ("metrics", [{"a": value} for value in (1, 0.5, True)], {"a": "many"}),
        ("reward", [1, 0.5], "much"),
    ],
)
def test_a_field_takes_plain_values_of_its_kind(field: str, good: list[Any], bad: Any) -> None:
    assert [getattr(art.Trajectory(**{field: value}), field) for value in good] == good
    with pytest.raises(ValidationError):
        art.Trajectory(**{field: bad})


def test_messages_are_those_of_dictionaries_and_choices_and_their_tool_calls() -> None:
    made = art.Trajectory(
        messages_and_choices=[user("u"), said("hi"), user("v"), said(None, tool_calls=[CALL])], tools=[TOOL]
    )
    *spoken, message = made.messages()
    assert spoken == [user("u"), {"role": "assistant", "content": "hi"}, user("v")]
    assert (message["role"], message["content"]) == ("assistant", "")
    (call,) = message["tool_calls"]
    assert (call["id"], call["type"], call["function"]) == ("c1", "function", CALL["function"])
    assert made.tools == [TOOL]


def test_a_subclass_may_have_more_fields() -> None:
    class Own(art.Trajectory):  # type: ignore[misc, name-defined]
        answer: str | None = None

    made = Own(reward=1, answer="x", rewrd=2)
    assert not hasattr(made, "rewrd"), "an unknown field is ignored"
    assert (made.answer, made.reward) == ("x", 1.0)
    assert isinstance(art.TrajectoryGroup([made]).trajectories[0], Own)


def test_finish_notes_the_duration() -> None:
    made = art.Trajectory()
    assert made.finish() is made
    assert made.metrics["duration"] >= 0


def test_durations_are_tracked_and_added() -> None:
    async def run() -> dict[str, float]:
        made = art.Trajectory()
        for _ in range(2):
            with contextlib.suppress(KeyError):
                async with made.track_duration("llm"):
                    await asyncio.sleep(0.01)
                    raise KeyError("x")  # the block that fails is tracked, too
        return dict(made.metrics)

    (name,), (seconds,) = zip(*asyncio.run(run()).items(), strict=True)
    assert name == "llm_duration"
    assert seconds >= 0.015


def test_a_trajectory_is_shown_logged_and_read_from_json() -> None:
    made = art.Trajectory(
        messages_and_choices=[user("u"), said("x")],
        reward=0.5,
        metrics={"a": 2},
        metadata={"b": None},
        logs=["l"],
    )
    assert all(piece in str(made) for piece in ("reward=0.5", "'a': 2", "'b': None"))
    shown = made.for_logging()
    assert [(m["role"], m["trainable"]) for m in shown["messages"]] == [("user", False), ("assistant", True)]
    assert (shown["reward"], shown["metadata"], shown["logs"]) == (0.5, {"b": None}, ["l"])
    made.messages_and_choices.pop()
    again = art.Trajectory.model_validate_json(made.model_dump_json())
    assert (again.messages(), again.reward, again.metrics, again.metadata) == (
        [user("u")], 0.5, {"a": 2}, {"b": None}
    )  # fmt: skip


# -- groups --------------------------------------------------------------------------------------------------------


def test_a_group_holds_trajectories_and_keeps_exceptions_as_values() -> None:
    one, other = art.Trajectory(reward=1), art.Trajectory(reward=2)
    group = art.TrajectoryGroup(item for item in (one, ValueError("no"), other))
    assert (len(group), list(group)) == (2, [one, other])
    assert (group.metadata, group.metrics, group.logs) == ({}, {}, [])
    group = art.TrajectoryGroup(
        [*group.trajectories, ValueError("no")], exceptions=[KeyError("k")], metadata={"a": "b"}, metrics={"c": 1},
        logs=["d"],
    )  # fmt: skip
    group.log("e")
    assert (group.metadata, group.metrics, group.logs) == ({"a": "b"}, {"c": 1}, ["d", "e"])
    assert ["ValueError" in e.type for e in group.exceptions] == [True, False]
    assert group.exceptions[0].message == "no"
    assert "ValueError: no" in group.exceptions[0].traceback


def test_a_copy_of_a_group_has_a_list_of_its_own() -> None:
    group = art.TrajectoryGroup([art.Trajectory(reward=1)], metadata={"a": 1})
    shallow, deep = copy.copy(group), copy.deepcopy(group)
    assert shallow.trajectories[0] is group.trajectories[0]
    assert deep.trajectories[0] is not group.trajectories[0]
    deep.trajectories[0].reward = 7
    shallow.trajectories.append(art.Trajectory())
    assert rewards(group) == [1]
    assert (shallow.metadata, deep.metadata) == ({"a": 1}, {"a": 1})


def test_an_awaited_group_plays_its_coroutines_at_the_same_time_and_raises_what_they_raise() -> None:
    inside = most = 0

    async def one() -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.02)
        inside -= 1
        return art.Trajectory()

    async def run(*more: Any) -> Any:
        return await art.TrajectoryGroup([*(one() for _ in range(5)), *more], metadata={"a": 1})

    group = asyncio.run(run())
    assert isinstance(group, art.TrajectoryGroup)
    assert (most, len(group), group.metadata) == (5, 5, {"a": 1})
    with pytest.raises(RuntimeError, match="boom"):
        asyncio.run(run(failed()))


# -- gathering -----------------------------------------------------------------------------------------------------


def test_groups_come_in_their_order() -> None:
    groups = gathered(lambda: [art.TrajectoryGroup([played(n, 0.03 - n / 100)]) for n in range(3)])
    assert [rewards(group) for group in groups] == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("allowed", "good", "bad", "raised"),
    [
        (1, 2, 1, False), (1, 2, 2, True), (2, 2, 2, False), (0.5, 2, 2, False), (0.5, 1, 3, True),
        (0.25, 3, 1, False), (0.1, 2, 1, True), (100, 0, 3, False), (0, 1, 1, True),
    ],
)  # fmt: skip
def test_so_many_exceptions_are_kept(allowed: float, good: int, bad: int, raised: bool) -> None:
    def groups() -> list[Any]:
        return [
            art.TrajectoryGroup([*(played(1) for _ in range(good)), *(failed(f"no {n}") for n in range(bad))])
        ]

    if raised:
        with pytest.raises(RuntimeError, match="no"):
            gathered(groups, max_exceptions=allowed)
        return
    (group,) = gathered(groups, max_exceptions=allowed)
    assert (len(group), len(group.exceptions)) == (good, bad)
    assert {e.message for e in group.exceptions} == {f"no {n}" for n in range(bad)}
    if allowed >= 1:  # they are counted over all groups
        assert len(gathered(lambda: groups() + groups(), max_exceptions=2 * bad)) == 2
        with pytest.raises(RuntimeError, match="no"):
            gathered(lambda: groups() + groups(), max_exceptions=2 * bad - 1)


def test_after_each_may_change_leave_out_and_multiply_groups() -> None:
    async def after(group: Any) -> Any:
        (reward,) = rewards(group)
        if reward == 9:
            raise ValueError("after")
        group.trajectories[0].reward += 10
        return {0: None, 1: group}.get(reward, [group, copy.deepcopy(group)])

    groups = gathered(lambda: [art.TrajectoryGroup([played(n)]) for n in range(3)], after_each=after)
    assert [rewards(group) for group in groups] == [[11], [12], [12]]
    with pytest.raises(ValueError, match="after"):
        gathered(lambda: [art.TrajectoryGroup([played(9)])], after_each=after, max_exceptions=5)


def test_an_awaitable_group_may_fail_itself() -> None:
    async def broken() -> Any:
        raise KeyError("group")

    def groups() -> list[Any]:
        return [broken(), art.TrajectoryGroup([played(2)])]

    assert [rewards(group) for group in gathered(groups, max_exceptions=1)] == [[2]]
    with pytest.raises(KeyError):
        gathered(groups)


def test_trajectories_several_of_one_awaitable_and_exceptions_come_in_their_order() -> None:
    async def both() -> Any:
        return [await played(2), await played(3)]

    async def run(allowed: float) -> Any:
        playing = [played(1, 0.03), failed(), both(), played(4)]
        return await art.gather_trajectories(playing, pbar_desc="play", max_exceptions=allowed)

    one, error, pair, other = asyncio.run(run(1))
    assert (one.reward, type(error), [t.reward for t in pair], other.reward) == (1, RuntimeError, [2, 3], 4)
    with pytest.raises(RuntimeError):
        asyncio.run(run(0))


def test_the_progress_shows_metrics_and_tokens() -> None:
    def groups() -> list[Any]:
        return [art.TrajectoryGroup([played(1, metrics={"a": 1, "b": True})])]

    (group,) = gathered(groups, pbar_desc="x", pbar_total_completion_tokens=True, max_metrics=1)
    assert len(group) == 1


# -- batches -------------------------------------------------------------------------------------------------------


def batches(groups: Callable[[], Iterator[Any]], **options: Any) -> list[list[Any]]:
    async def run() -> list[list[Any]]:
        return [batch async for batch in art.trajectory_group_batches(groups(), **options)]

    return asyncio.run(run())


def singles(count: int) -> Callable[[], Iterator[Any]]:
    return lambda: (art.TrajectoryGroup([played(n)]) for n in range(count))


@pytest.mark.parametrize("skipped", [0, 1])
def test_batches_hold_every_group_once_but_those_that_are_skipped(skipped: int) -> None:
    made = batches(singles(6), batch_size=2, skip_batches=skipped)
    assert all(made)
    assert sorted(t.reward for batch in made for group in batch for t in group) == list(range(2 * skipped, 6))


def test_exceptions_of_batches_are_raised_or_allowed() -> None:
    def groups() -> Iterator[Any]:
        return (art.TrajectoryGroup([played(1), failed()]) for _ in range(4))

    with pytest.raises(RuntimeError):
        batches(groups, batch_size=2)
    made = batches(groups, batch_size=2, max_batch_exceptions=100)
    assert [[len(group.exceptions) for group in batch] for batch in made] == [[1, 1], [1, 1]]


# -- captured trajectories -----------------------------------------------------------------------------------------


class Server(BaseHTTPRequestHandler):
    """A model behind OpenAI's API: it says how many messages it was sent, or what `content` says."""

    content: Callable[[dict[str, Any]], str] | None = None
    requests: list[tuple[dict[str, str], dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        cls = type(self)
        cls.requests.append(({k.lower(): v for k, v in self.headers.items()}, body))
        text = cls.content(body) if cls.content is not None else f"after {len(body['messages'])}"
        logprobs = {"content": [{"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": []}]}
        self.send_response(200)
        if body.get("stream"):
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            top = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
            pieces = [
                {"index": 0, "delta": {"role": "assistant", "content": piece}, "logprobs": logprobs}
                for piece in (text[:3], text[3:])
            ]
            for choice in [*pieces, {"index": 0, "delta": {}, "finish_reason": "stop"}]:
                self.wfile.write(f"data: {json.dumps({**top, 'choices': [choice]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
            return
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": logprobs}
        top = {"id": "c", "object": "chat.completion", "created": 1, "model": body["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        data = json.dumps({**top, "choices": [choice], "usage": usage}).encode()
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


class Served:
    def __init__(self, url: str, handler: type[Server]) -> None:
        self.url, self._handler = url, handler

    @property
    def requests(self) -> list[tuple[dict[str, str], dict[str, Any]]]:
        return self._handler.requests

    def says(self, content: Callable[[dict[str, Any]], str]) -> None:
        self._handler.content = staticmethod(content)


@pytest.fixture
def served() -> Iterator[Served]:
    handler = type("Handler", (Server,), {"requests": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield Served(f"http://127.0.0.1:{server.server_port}/v1", handler)
    server.shutdown()
    server.server_close()


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


# -- models --------------------------------------------------------------------------------------------------------


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


# -- helpers -------------------------------------------------------------------------------------------------------


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


# -- RULER ---------------------------------------------------------------------------------------------------------


def judge(marks: Sequence[str], worth: Callable[[int], float] = lambda n: n / 10) -> Callable[[Any], str]:
    """A judge that scores the attempt with the n-th mark in its text. ART's prompt numbers the attempts; ours shows
    them in another order in each call, under ids drawn for it, and names the key of the scores."""

    def reply(request: dict[str, Any]) -> str:
        prompt = request["messages"][-1]["content"]
        shown = re.findall(r"BEGIN [0-9a-f]{16} trajectory (\w+) =+\n(.*?)\n=+ END", prompt, re.S)
        key = "id" if shown else "trajectory_id"
        names = [next((i for i, text in shown if mark in text), str(n)) for n, mark in enumerate(marks, 1)]
        drawn = re.search(r'"(score_\w+)"', request["messages"][0]["content"])
        score = drawn[1] if drawn and shown else "score"
        said = [{key: name, "explanation": f"why {n}", score: worth(n)} for n, name in enumerate(names, 1)]
        return json.dumps({"scores": said})

    return reply


def marks(count: int) -> list[str]:
    return [f"reply number {n}" for n in range(1, count + 1)]


def answers(count: int) -> Any:
    shared = [{"role": "system", "content": "the one goal"}, user("go")]
    return art.TrajectoryGroup(
        [
            art.Trajectory(
                messages_and_choices=[*shared, said(f"reply number {n}")], reward=n, metrics={"w": 1}
            )
            for n in range(1, count + 1)
        ]
    )


def score(group: Any, served: Served, **options: Any) -> Any:
    params = {"api_base": served.url, "api_key": "k"}
    run = part("rewards").ruler_score_group(group, "openai/judge", extra_litellm_params=params, **options)
    return asyncio.run(run)


def test_ruler_scores_a_group(served: Served) -> None:
    served.says(judge(marks(3)))
    group = answers(3)
    judged = score(group, served)
    assert judged is not group
    assert [t.reward for t in judged] == [0.1, 0.2, 0.3]
    assert [t.metrics["independent_reward"] for t in judged] == [1, 2, 3]
    assert [t.metrics["ruler_score"] for t in judged] == [0.1, 0.2, 0.3]
    assert [t.metrics["w"] for t in judged] == [1, 1, 1]
    assert [t.logs[-1] for t in judged] == [f"RULER explanation: why {n}" for n in (1, 2, 3)]
    assert [t.reward for t in group] == [1, 2, 3]


def test_ruler_shows_what_is_common_once(served: Served) -> None:
    served.says(judge(marks(4)))
    score(answers(4), served, rubric="- my own rubric 4")
    _, body = served.requests[0]
    text = json.dumps(body["messages"])
    assert (text.count("the one goal"), text.count("my own rubric 4")) == (1, 1)
    assert all(text.count(f"reply number {n}") == 1 for n in range(1, 5))
    assert body["model"] == "judge"
    assert body["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize("reply", [judge(marks(1))({"messages": [{"content": ""}]}), "no JSON at all"])
def test_a_judge_that_does_not_answer_the_question(served: Served, reply: str) -> None:
    served.says(lambda _: reply)
    with pytest.raises(ValueError, match=r"."):
        score(answers(5 + len(reply)), served)
    assert score(answers(6 + len(reply)), served, swallow_exceptions=True) is None


def test_ruler_takes_no_additional_histories(served: Served) -> None:
    group = answers(2)
    group.trajectories[0].additional_histories = [part("trajectories").History(messages_and_choices=[])]
    with pytest.raises(ValueError, match=r"(?i)histories"):
        score(group, served)


def test_ruler_scores_lists_of_messages(served: Served) -> None:
    served.says(judge(["one way", "another way"]))
    run = part("rewards").ruler(
        [[user("one way")], [user("another way")]],
        "openai/judge",
        extra_litellm_params={"api_base": served.url, "api_key": "k"},
        tools=[TOOL],
    )
    made = asyncio.run(run)
    assert [(s.trajectory_id, s.explanation, s.score) for s in made] == [
        ("1", "why 1", 0.1),
        ("2", "why 2", 0.2),
    ]
    assert "find" in json.dumps(served.requests[0][1]["messages"])


def test_ruler_of_nothing() -> None:
    assert asyncio.run(part("rewards").ruler([], "openai/judge")) == []
    assert len(asyncio.run(part("rewards").ruler_score_group(art.TrajectoryGroup([]), "openai/judge"))) == 0


def test_ruler_after_each_group(served: Served) -> None:
    served.says(judge(["here 0", "here 1"], lambda n: n / 4))

    async def rollout(n: int) -> Any:
        return art.Trajectory(messages_and_choices=[user("x"), said(f"here {n}")], reward=0)

    groups = gathered(
        lambda: [art.TrajectoryGroup(rollout(n) for n in range(2))],
        after_each=lambda g: part("rewards").ruler_score_group(
            g, "openai/judge", {"api_base": served.url, "api_key": "k"}, swallow_exceptions=True
        ),
    )
    assert [rewards(group) for group in groups] == [[0.25, 0.5]]


# -- tools and scenarios -------------------------------------------------------------------------------------------


def test_tools_and_resources_of_a_server() -> None:
    mcp = part("mcp")
    fields = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    tool = mcp.MCPTool.from_dict(fields)
    assert (tool, tool.to_dict()) == (mcp.MCPTool(**fields), fields)
    assert tool.to_tool_schema() == {"type": "function", "function": fields}
    assert mcp.MCPTool.from_dict({"name": "f"}).description == ""
    made = mcp.MCPResource.from_dict({"uri": "u", "name": "n", "mimeType": "text/plain"})
    assert (made.uri, made.name, made.description, made.mime_type) == ("u", "n", "", "text/plain")


def scenario(task: str, difficulty: int) -> Any:
    return part("mcp").GeneratedScenario(task=task, difficulty=difficulty)


def test_a_scenario_has_a_difficulty_from_1_to_5() -> None:
    assert scenario("x" * 30, 2).preview(10) == "x" * 10 + "…"
    assert scenario("t", 2).to_dict() == {"task": "t", "difficulty": 2}
    for difficulty in (0, 6, "3"):
        with pytest.raises(ValueError, match=r"(?i)difficulty"):
            scenario("t", difficulty)  # type: ignore[arg-type]


def test_a_collection_of_scenarios() -> None:
    kind = part("mcp").GeneratedScenarioCollection
    made = kind([scenario(f"t{n}", 1 + n % 5) for n in range(7)])
    assert (len(made), made[0].task, [s.task for s in made[1:3]]) == (7, "t0", ["t1", "t2"])
    train, val = made.split(3)
    assert ([s.task for s in train], len(val)) == (["t0", "t1", "t2"], 4)
    assert sorted(s.task for s in made.shuffle()) == [f"t{n}" for n in range(7)]
    assert [s.difficulty for s in made.filter_by_difficulty(2, 3)] == [2, 3, 2]
    assert made.get_difficulty_distribution() == {1: 2, 2: 2, 3: 1, 4: 1, 5: 1}
    summary = made.get_summary()
    assert (summary["total_scenarios"], summary["avg_task_length"]) == (7, 2)
    with pytest.raises(ValueError, match="train_size"):
        made.split(8)
    assert kind.from_json(made.to_json()).to_dicts() == made.to_dicts()
    assert kind.from_dicts(made.to_dicts())[1].difficulty == 2


def generated(
    served: Served, tools: Any = ({"name": "find", "description": "finds"},), **options: Any
) -> Any:
    options = {
        "generator_model": "gen",
        "generator_api_key": "key",
        "generator_base_url": served.url,
    } | options
    return asyncio.run(part("mcp").generate_scenarios(list(tools), num_scenarios=3, **options))


def test_scenarios_are_generated_of_tools(served: Served) -> None:
    made = {"scenarios": [{"task": f"task {n}", "difficulty": 1 + n % 5} for n in range(3)]}
    served.says(lambda _: json.dumps(made))
    stock = {"uri": "file://inventory", "name": "inventory", "description": "stock"}
    collection = generated(served, resources=[stock], custom_instructions="mention ships", show_preview=True)
    assert [s.task for s in collection] == ["task 0", "task 1", "task 2"]
    headers, body = served.requests[0]
    assert (headers["authorization"], body["model"]) == ("Bearer key", "gen")
    text = json.dumps(body["messages"])
    assert all(word in text for word in ("find", "inventory", "mention ships"))


def test_what_is_lacking_for_scenarios_is_an_error(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.says(lambda _: json.dumps({"scenarios": [{"task": "t", "difficulty": 1}]}))
    with pytest.raises(ValueError, match="3"):
        generated(served)
    with pytest.raises(ValueError, match="resource"):
        generated(served, tools=())
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(ValueError, match="OPENROUTER_API_KEY"):
        generated(served, generator_api_key=None)


# -- LangGraph -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:create_react_agent")
def test_the_chat_model_of_a_wrapped_rollout(served: Served) -> None:
    pytest.importorskip("langchain_openai")
    prebuilt = pytest.importorskip("langgraph.prebuilt")
    langgraph = part("langgraph")
    model = art.Model(
        name="gpt",
        project="p",
        inference_api_key="k",
        inference_base_url=served.url,
        inference_model_name="gpt",
    )

    async def rollout(_: Any, text: str) -> Any:
        chat = langgraph.init_chat_model(model.get_inference_name(), temperature=1.0)
        agent = prebuilt.create_react_agent(chat, [])
        await agent.ainvoke({"messages": [("user", text)]}, config={"configurable": {"thread_id": "t"}})
        if hasattr(chat, "root_async_client"):
            await chat.root_async_client.close()  # LangChain leaves it open
        return art.Trajectory(reward=0.5, metadata={"a": 1})

    made = asyncio.run(langgraph.wrap_rollout(model, rollout)(model, "hello"))
    assert (made.reward, made.metadata) == (0.5, {"a": 1})
    assert [(m["role"], m["content"]) for m in made.messages()] == [
        ("user", "hello"),
        ("assistant", "after 1"),
    ]
    assert isinstance(made.messages_and_choices[1], Choice)
