"""Helpers that read a folder, show a message and log a refused request, and what servers of tools list."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from journeywork.art.gathering import GatherContext
from journeywork.art.mcp.types import GeneratedScenarioCollection, MCPResource, MCPTool
from journeywork.art.trajectories import Trajectory
from journeywork.art.utils import format_message, get_model_step, iterate_dataset, log_http_errors
from journeywork.art.utils.output_dirs import get_output_dir_from_model_properties, get_step_checkpoint_dir
from pipeline.config import Config
from trainer.checkpoints.checkpoint import Checkpoints

pytestmark = pytest.mark.anyio


def test_the_newest_checkpoint_of_the_newest_base_model_counts(tmp_path: Path) -> None:
    model = SimpleNamespace(name="m", project="p")
    folder = tmp_path / "p" / "models" / "m"
    for step in ("step-00000009", "step-00000011", "step-x", "other"):
        (folder / "journeywork" / "checkpoints" / "p" / "main" / "m" / step).mkdir(parents=True)
    assert get_model_step(model, str(tmp_path)) == 11
    (folder / "journeywork-sft-0001").mkdir()
    assert get_model_step(model, str(tmp_path)) == 0
    (folder / "journeywork-sft-0001" / "checkpoints" / "p" / "main" / "m" / "step-00000002").mkdir(
        parents=True
    )
    assert get_model_step(model, str(tmp_path)) == 2


@pytest.mark.parametrize("name", ["m", "qwen2.5", "Größe ~x"])
def test_the_checkpoints_of_every_name_are_found(name: str, tmp_path: Path) -> None:
    config = Config(project="p.1", run_dir=str(tmp_path / "p.1" / "models" / name / "journeywork"))
    checkpoints = Checkpoints.of(config, name)
    checkpoints.path(7).mkdir(parents=True)
    assert get_model_step(SimpleNamespace(name=name, project="p.1"), str(tmp_path)) == 7
    output = get_output_dir_from_model_properties("p.1", name, str(tmp_path))
    assert get_step_checkpoint_dir(output, 7) == str(checkpoints.path(7))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": "hi"}, "user:\nhi"),
        (
            {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "x"}]},
            'user:\nhi\n{"type": "x"}',
        ),
        (
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
            },
            "assistant:\ncalls f({})",
        ),
    ],
)
def test_a_message_is_shown(message: dict[str, Any], text: str) -> None:
    assert format_message(message) == text


async def test_the_body_of_a_refused_request_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404, stream=httpx.ByteStream(b"no such model"))

    @log_http_errors
    async def ask() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            (await client.get("http://gateway/x")).raise_for_status()

    with caplog.at_level(logging.ERROR), pytest.raises(httpx.HTTPStatusError):
        await ask()
    assert "GET http://gateway/x answered 404: no such model" in caplog.text


def test_a_batch_is_the_tuple_of_earlier_versions_of_art() -> None:
    assert [tuple(batch) for batch in iterate_dataset([1], num_epochs=2, use_tqdm=False)] == [
        ([1], 0, 0, 0),
        ([1], 1, 1, 0),
    ]


def test_a_name_without_a_value_hides_no_value_by_the_protocols_name() -> None:
    schema = {"type": "object"}
    assert MCPTool.from_dict({"name": "f", "parameters": None, "inputSchema": schema}).parameters == schema
    assert MCPTool.from_dict({"name": "f", "parameters": None}).parameters == {}
    assert MCPResource.from_dict({"uri": "u", "mime_type": None, "mimeType": "a/b"}).mime_type == "a/b"


def test_scenarios_are_split_at_a_size_that_there_is() -> None:
    scenarios = GeneratedScenarioCollection.from_dicts([{"task": "t", "difficulty": 1}] * 7)
    assert [len(part) for part in scenarios.split(7)] == [7, 0]
    for size in (8, -1):
        with pytest.raises(ValueError, match=rf"train_size is {size}, but must be from 0 to 7"):
            scenarios.split(size)


def test_a_share_of_exceptions_is_allowed_whole() -> None:
    context = GatherContext(SimpleNamespace(total=100), max_exceptions=0.29)
    context.metric_sums["exceptions"] = 29
    assert not context.too_many_exceptions()
    context.metric_sums["exceptions"] = 30
    assert context.too_many_exceptions()


def test_metrics_that_are_named_as_the_counts_are_counted_beside_them() -> None:
    """A metric `exceptions` ended the gathering, and a metric `reward` hid the reward."""
    context = GatherContext(max_exceptions=1)
    context.allow()
    context.count(
        Trajectory(reward=0.5, messages_and_choices=[], metrics={"exceptions": 2, "reward": 7.0, "won": True})
    )
    assert not context.too_many_exceptions()
    assert context.metric_sums == {
        "exceptions": 1, "reward": 0.5, "metrics/exceptions": 2, "metrics/reward": 7.0, "won": 1
    }  # fmt: skip
