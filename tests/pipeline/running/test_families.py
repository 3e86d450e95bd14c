"""vLLM's tool parser by a model's family, and the command that `up` makes of it."""

import json
from pathlib import Path

import pytest

from pipeline.config import Config, ModelConfig, VllmConfig
from pipeline.running.families import TOOL_PARSERS, tool_parser
from pipeline.running.plan import vllm_command
from tests.conftest import VllmServer


def model(folder: Path, kind: str) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder)


def command(base: str, **settings: object) -> str:
    config = Config(models=(ModelConfig(base=base),), vllm=VllmConfig(**settings))  # type: ignore[arg-type]
    return " ".join(vllm_command(config, 1).argv)


def test_every_parser_is_one_of_vllms() -> None:
    parsers = pytest.importorskip("vllm.tool_parsers").ToolParserManager
    assert set(TOOL_PARSERS.values()) <= set(parsers.list_registered())


def test_the_family_says_how_tool_calls_are_read(tmp_path: Path) -> None:
    assert tool_parser(str(VllmServer.base)) == "hermes"
    assert tool_parser(model(tmp_path / "a", "gpt_oss")) == "openai"
    assert tool_parser(model(tmp_path / "Qwen3-Coder-30B", "qwen3_moe")) == "qwen3_coder"
    assert tool_parser(model(tmp_path / "b", "unheard_of")) == ""
    llama = Path(model(tmp_path / "llama", "llama"))
    assert tool_parser(str(llama)) == "llama3_json"
    (llama / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|im_start|>"}]}')
    assert tool_parser(str(llama)) == "hermes"  # else vLLM ends: it does not find the token that begins a call
    (llama / "tokenizer.json").write_text('{"added_tokens": [{"content": "<|python_tag|>"}]}')
    assert tool_parser(str(llama)) == "llama3_json"
    assert tool_parser(str(tmp_path / "nowhere")) == tool_parser("org/not-in-the-cache") == ""


def test_the_command_has_the_flags_that_tools_need(tmp_path: Path) -> None:
    base, unknown = model(tmp_path / "a", "llama"), model(tmp_path / "b", "unheard_of")
    flags = "--enable-auto-tool-choice --tool-call-parser"
    assert f"{flags} llama3_json" in command(base)
    assert f"{flags} pythonic" in command(base, tool_parser="pythonic")
    assert flags not in command(base, tool_parser="")
    assert flags not in command(unknown)
    given = command(base, args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"))
    assert given.count("--tool-call-parser") == 1
    assert "--tool-call-parser" not in command(base, args=("--enable_auto_tool_choice", "--tool_call_parser=hermes"))
    assert "--reasoning-parser qwen3" in command(base, reasoning_parser="qwen3")
