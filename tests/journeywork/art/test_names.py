"""Every public name of openpipe-art 0.5.18 is here, or is refused by a sentence that says what to do instead."""

from __future__ import annotations

import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat.chat_completion import Choice

import journeywork.art as art
from journeywork.art.guided_completion import get_guided_completion_params
from journeywork.art.openai import consume_sync_chat_completion_stream
from journeywork.art.refused import METHODS, REFUSED
from journeywork.art.trajectories import as_groups
from journeywork.art.utils.strip_logprobs import strip_logprobs
from tests.journeywork.art import names

MODULES: dict[str, list[str]] = json.loads(names.FILE.read_text())


def test_the_table_of_the_page_is_the_generated_one() -> None:
    page = names.PAGE.read_text("utf-8")
    assert names.table(MODULES) in page, "run `python -m tests.journeywork.art.names`"


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_name_says_what_to_do(name: str) -> None:
    module, _, member = (f"{name}.backend" if names.WHOLE.get(name) else name).rpartition(".")
    imported: dict[str, Any] = {}
    exec(f"from journeywork.art.{module} import {member} as refused".replace(". ", " "), imported)
    for use in (imported["refused"], iter, lambda refused: refused.some_name()):
        with pytest.raises(art.UnsupportedError, match="is not in Journeywork: "):
            use(imported["refused"])
    assert any(name == module or name.rpartition(".")[0] == module for module in MODULES)


def test_a_refused_name_says_the_same_as_an_attribute() -> None:
    """In a process that imported nothing but the package. A name of ART that is a module here is that module."""
    program = """
from importlib import import_module
import journeywork.art as art
from journeywork.art.refused import REFUSED
for name in REFUSED:
    package, _, member = name.rpartition(".")
    if package not in ("", "dev", "utils", "local", "langgraph", "serverless"):
        continue
    found = getattr(import_module(f"journeywork.art.{package}".rstrip(".")), member)
    try:
        found.some_name()
    except art.UnsupportedError as error:
        assert REFUSED[name] in str(error), name
    else:
        raise AssertionError(name)
from journeywork.art import megatron, tinker, tinker_native
assert art.megatron.MegatronBackend is megatron.MegatronBackend
for name in ("nonsense", "_conf", "__wrapped__"):
    assert not hasattr(art, name), name
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_program_that_names_what_it_does_not_reach_runs() -> None:
    imported: dict[str, Any] = {}
    exec(
        "from journeywork.art.utils.deployment import TogetherDeploymentConfig\n"
        "from journeywork.art.utils.deployment.wandb import deploy_wandb\n"
        "from journeywork.art.utils.s3 import S3SyncError\n"
        "class Config(TogetherDeploymentConfig): pass\n"
        "def deploy(config: TogetherDeploymentConfig | None = None): return Config() if config else deploy_wandb()\n"
        "try: raise ValueError\n"
        "except (S3SyncError, ValueError): pass\n",
        imported,
    )
    for config in (None, 1):
        with pytest.raises(art.UnsupportedError, match="journeywork export"):
            imported["deploy"](config)


def test_lines_on_the_terminal_and_costs_are_where_programs_import_them(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from journeywork.art.api_costs import track_api_cost
    from journeywork.art.mcp.generate_scenarios import preview_scenarios
    from journeywork.art.utils.logging import dim, ok

    ok("served")
    dim("later")
    first, second = capsys.readouterr().out.splitlines()
    assert (first[11:], second) == ("OK    served", "later")
    assert track_api_cost(source="s", provider="p", model_name="m")(len)([1]) == 1
    caplog.set_level(logging.INFO)
    preview_scenarios([{"task": "look", "difficulty": 2}] * 3, n=2)
    assert [record.getMessage() for record in caplog.records] == [
        "1. look (difficulty 2)",
        "2. look (difficulty 2)",
    ]


def test_names_that_art_does_not_have_are_ordinary_errors() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("journeywork.art.nonsense")
    with pytest.raises(AttributeError):
        importlib.import_module("journeywork.art.gather").nonsense  # noqa: B018
    with pytest.raises(AttributeError):
        art.RemoteBackend("http://gateway").nonsense()


@pytest.mark.parametrize("name", METHODS)
def test_a_refused_method_says_what_to_do(name: str) -> None:
    model = art.TrainableModel(name="m", project="p", base_model="b")
    for owner in (model, art.RemoteBackend("http://gateway")):
        with pytest.raises(art.UnsupportedError, match=rf"\.{name} is not in Journeywork: "):
            getattr(owner, name)


def test_lists_are_groups_and_none_is_left_out() -> None:
    trajectory = art.Trajectory(messages_and_choices=[], reward=1.0)
    group = art.TrajectoryGroup([trajectory])
    groups = as_groups([group, [trajectory, trajectory], None, trajectory])
    assert [len(each) for each in groups] == [1, 2, 1]
    assert groups[0] is group


@pytest.mark.anyio
async def test_the_best_version_is_named_by_any_metric_and_nothing_is_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model: Any = art.TrainableModel(name="m", project="p", base_model="b", base_path=str(tmp_path))
    await model.delete_checkpoints()
    for step, accuracy in ((1, 0.5), (2, 0.75), (3, 0.25), (2, 0.5)):
        await model.log(metrics={"val/accuracy": accuracy}, step=step)
    await model.delete_checkpoints("val/accuracy")
    warned, told = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert warned == (
        logging.WARNING,
        "delete_checkpoints: no row that model.log wrote has the metric 'val/reward'",
    )
    assert told == (logging.INFO, "the best version by val/accuracy is m@2")


def chunk(delta: dict[str, Any], **fields: Any) -> ChatCompletionChunk:
    choice = {"index": 0, "delta": delta, "finish_reason": None, **fields}
    return ChatCompletionChunk.model_validate(
        {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    )


def test_a_streamed_completion_keeps_its_reference() -> None:
    call = {"index": 0, "id": "i", "type": "function", "function": {"name": "look", "arguments": '{"at"'}}
    chunks = [
        chunk({"role": "assistant", "content": "a"}), chunk({"role": "assistant", "content": "b"}),
        chunk({"tool_calls": [call]}), chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
        chunk({}, finish_reason="tool_calls", journeywork={"trajectory": "t", "reply": "c"}),
    ]  # fmt: skip
    choice = consume_sync_chat_completion_stream(chunks).choices[0]  # type: ignore[arg-type]  # any iterable
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "ab",
        "tool_calls",
    )
    (call_made,) = choice.message.tool_calls or ()
    assert call_made.model_dump()["function"].items() >= {"name": "look", "arguments": '{"at":1}'}.items()
    assert choice.model_extra == {"journeywork": {"trajectory": "t", "reply": "c"}}
    with pytest.raises(ValueError, match="no chunk"):
        consume_sync_chat_completion_stream([])  # type: ignore[arg-type]


def test_a_teachers_reply_guides_a_student() -> None:
    def completion(message: dict[str, Any]) -> ChatCompletion:
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", **message}}
        made = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
        return ChatCompletion.model_validate(made)

    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    assert get_guided_completion_params(completion({"content": "yes"})) == (["yes"], None, None)
    call = {"id": "i", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    choices, tool, frozen = get_guided_completion_params(completion({"tool_calls": [call]}), tools)
    assert (choices, tool) == (None, {"type": "function", "function": {"name": "look"}})
    assert frozen is not None
    assert frozen[0]["function"]["parameters"]["properties"] == {"at": {"const": 1}}
    assert tools[0]["function"]["parameters"] == {"type": "object"}, "the given tool is as it was"
    with pytest.raises(ValueError, match="'look', which is not in `base_tools`"):
        get_guided_completion_params(completion({"tool_calls": [call]}))


def test_logprobs_are_left_out_at_every_depth() -> None:
    choice = Choice.model_validate(
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"},
         "logprobs": {"content": [], "refusal": None}}
    )  # fmt: skip
    stripped = strip_logprobs({"logprobs": 1, "calls": [choice, (choice,)]})
    assert stripped.keys() == {"calls"}
    assert stripped["calls"][0].logprobs is None
    assert stripped["calls"][1][0].logprobs is None
    assert choice.logprobs is not None
    assert strip_logprobs(SimpleNamespace(a=1)).a == 1


def test_a_refused_name_is_one_class_wherever_it_is_imported() -> None:
    """Each import made another one, so that programs compared different classes."""
    from journeywork.art.dev import model
    from journeywork.art.dev.model import DebugOption
    from journeywork.art.utils import deployment

    assert DebugOption is model.DebugOption
    assert deployment.Config is deployment.Config
    assert DebugOption is not deployment.Config
