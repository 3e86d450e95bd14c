"""ART's experimental options of a model, as settings of the installation that `LocalBackend` starts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

import journeywork.art as art
from journeywork.art.dev import InternalModelConfig, get_openai_server_config, settings_of
from pipeline.config import load


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"peft_args": {"r": 20}}, {"trainer.lora.rank": 20, "vllm.max_lora_rank": 32}),
        ({"peft_args": {"r": 8}, "engine_args": {"max_lora_rank": 64}},
         {"trainer.lora.rank": 8, "vllm.max_lora_rank": 64}),
        ({"engine_args": {"tensor_parallel_size": 2, "enforce_eager": True}},
         {"vllm.args": ["--tensor-parallel-size", "2", "--enforce-eager"]}),
        ({"init_args": {"gpu_memory_utilization": 0.5}}, {"vllm.args": ["--gpu-memory-utilization", "0.5"]}),
        ({"chat_template": "{{ messages }}", "chat_template_kwargs": {"enable_thinking": False}},
         {"vllm.args": ["--chat-template", "{{ messages }}", "--default-chat-template-kwargs",
                        '{"enable_thinking": false}']}),
        ({"chat_template_path": "t.jinja", "chat_template_content_format": "openai"},
         {"vllm.args": ["--chat-template", "t.jinja", "--chat-template-content-format", "openai"]}),
    ],
)  # fmt: skip
def test_options_become_settings_that_an_installation_takes(
    config: InternalModelConfig, expected: dict[str, object], tmp_path: Path
) -> None:
    assert settings_of(config) == (expected, [])
    settings = [f"{name}={json.dumps(value)}" for name, value in expected.items()]
    loaded = load(None, ['models.0.name="m"', 'models.0.base="b"', *settings])
    assert loaded.vllm.max_lora_rank == expected.get("vllm.max_lora_rank", 8)


def test_options_without_effect_are_named() -> None:
    assert settings_of({"tinker_args": {"renderer_name": "qwen3"}, "rollout_weights_mode": "merged"}) == (
        {},
        ["tinker_args.renderer_name", "rollout_weights_mode"],
    )


def test_two_chat_templates_are_an_error() -> None:
    with pytest.raises(ValueError, match="chat_template or chat_template_path"):
        settings_of(art.dev.InternalModelConfig(chat_template="a", chat_template_path="b"))


def test_the_options_of_arts_own_server_are_a_dictionary() -> None:
    made = get_openai_server_config(
        "m", "b", "log", "adapters/0012", {"server_args": {"tool_call_parser": "x"}}
    )
    assert made["log_file"] == "log"
    assert made["server_args"]["tool_call_parser"] == "x"
    assert made["server_args"]["lora_modules"] == ['{"name": "m@12", "path": "adapters/0012"}']
    assert made["engine_args"]["served_model_name"] == "b"
    assert get_openai_server_config("m", "b", "log")["engine_args"]["served_model_name"] == "m"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("engine", "EngineArgs"),
        ("model", "TrainerArgs"),
        ("openai_server", "ServerArgs"),
        ("train", "TrainConfig"),
    ],
)
def test_types_are_at_the_modules_that_define_them(module: str, name: str) -> None:
    defined = importlib.import_module(f"journeywork.art.dev.{module}")
    assert getattr(defined, name) is getattr(art.dev, name)
