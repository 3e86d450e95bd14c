"""`[vllm]`: the inference servers."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Count, Natural, Port, Positive, Section


class VllmConfig(Section, frozen=True, kw_only=True):
    """The inference servers."""

    urls: tuple[str, ...] = ()
    """Servers that already run. Empty: `journeyman up` starts one."""
    api_key_file: str = ""
    """File with the API key that the gateway sends to the servers. `journeyman up` makes one for the server that it
    starts."""
    port: Port = 0
    """Port of the server that `journeyman up` starts; 0: any free one."""
    args: tuple[str, ...] = ()
    """Further arguments of that server, in JSON's form on the command line: `--set 'vllm.args=["--dtype", "bfloat16"]'`."""
    tool_parser: str = "auto"
    """How that server reads tool calls, by the name that vLLM's `--tool-call-parser` takes: agents may then leave the choice
    of a tool to the model. `auto`: by the model's family, none for an unknown one; empty: none."""
    reasoning_parser: str = ""
    """How that server reads thoughts, by the name that vLLM's `--reasoning-parser` takes (`qwen3`, `deepseek_r1`); empty:
    they are part of the reply's text."""
    env: dict[str, str] = {}
    """Further environment of that server."""
    max_loras: Count = 4
    """Adapters held at once: at least the staleness bound plus two."""
    max_lora_rank: Count = 8
    max_model_len: Natural = 0
    """0: the model's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    start_timeout_s: Positive = 600.0
    """An inference server that does not answer by then is killed and started again."""
