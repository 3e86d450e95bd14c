"""vLLM's tool parsers by model family.

Each family of models writes tool calls in its own form. vLLM has a parser for each form, and has to be told which one
to use. Here it follows from the model's configuration, unless the settings name one."""

from __future__ import annotations

from pathlib import Path

import msgspec

TOOL_PARSERS = {
    "apertus": "apertus",
    "cohere2": "cohere_command3",
    "deepseek_v3": "deepseek_v3",
    "ernie4_5_moe": "ernie45",
    "gemma4": "gemma4",
    "glm4_moe": "glm45",
    "gpt_oss": "openai",
    "granite": "granite",
    "granitemoehybrid": "granite4",
    "hunyuan_v1_moe": "hunyuan_a13b",
    "internlm2": "internlm",
    "jamba": "jamba",
    "kimi_k2": "kimi_k2",
    "lfm2": "lfm2",
    "llama": "llama3_json",
    "llama4": "llama4_pythonic",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
    "mistral3": "mistral",
    "olmo3": "olmo3",
    "phi3": "phi4_mini_json",
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_5": "qwen3_coder",
    "qwen3_5_moe": "qwen3_coder",
    "qwen3_moe": "hermes",
    "qwen3_next": "hermes",
    "seed_oss": "seed_oss",
    "step3_vl": "step3",
}
"""`model_type` of a model's configuration, to the name of vLLM's tool parser."""
_BY_NAME = {"qwen3-coder": "qwen3_coder", "deepseek-v3.1": "deepseek_v31", "functiongemma": "functiongemma"}
"""Parsers of models whose calls differ from those of their family, by a part of their name."""


_PARSER_TOKENS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "jamba": "<tool_calls>",
    "lfm2": "<|tool_call_start|>",
    "llama3_json": "<|python_tag|>",
}
"""The token that the tokenizer must have for vLLM to start with a parser. Some models of a family lack it, such as
SmolLM2, which is a `llama`."""
_PLAIN_TEXT_PARSER = "hermes"
"""The parser of models that lack their family's token: it reads calls that are plain text between tags."""


class _Configuration(msgspec.Struct):
    model_type: str = ""


def tool_parser(base: str) -> str:
    """Return the name of vLLM's tool parser for the model `base`, a folder or a name on the hub; empty if none is
    known, or the model's configuration can't be read. A name on the hub is looked up in the local cache only."""
    for part, parser in _BY_NAME.items():
        if part in base.lower():
            return parser
    file = _configuration(base)
    if file is None:
        return ""
    try:
        configuration = msgspec.json.decode(file.read_bytes(), type=_Configuration)
    except (OSError, msgspec.DecodeError):
        return ""  # vLLM reports what is wrong with it
    parser = TOOL_PARSERS.get(configuration.model_type, "")
    tokenizer = file.with_name("tokenizer.json")
    if (
        (token := _PARSER_TOKENS.get(parser))
        and tokenizer.is_file()
        and f'"{token}"' not in tokenizer.read_text("utf-8")
    ):
        return _PLAIN_TEXT_PARSER
    return parser


def _configuration(base: str) -> Path | None:
    """Return the `config.json` of a model, from its folder or from the hub's cache; `None` if there is none."""
    in_folder = Path(base) / "config.json"
    if in_folder.exists():
        return in_folder
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:  # an installation that serves no models
        return None
    try:
        cached = try_to_load_from_cache(base, "config.json")
    except ValueError:  # no name of the hub either
        return None
    return Path(cached) if isinstance(cached, str) else None
