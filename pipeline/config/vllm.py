"""`[vllm]`: the inference servers."""

from __future__ import annotations

from typing import Literal

from pipeline.config.types import Count, Natural, Port, Positive, Section


class VllmConfig(Section, frozen=True, kw_only=True):
    """The inference servers."""

    urls: tuple[str, ...] = ()
    """URLs of inference servers that already run. Empty: `journeyman up` starts one."""
    api_key_file: str = ""
    """File with the API key that the gateway sends to the servers. `journeyman up` makes one for the server that it
    starts."""
    port: Port = 0
    """Port of the server that `journeyman up` starts. 0: any free one."""
    args: tuple[str, ...] = ()
    """Further arguments of that server. As a flag, write a JSON list: `--set 'vllm.args=["--dtype", "bfloat16"]'`."""
    tool_parser: str = "auto"
    """Value of vLLM's `--tool-call-parser`. With a parser, agents may let the model choose tools (`tool_choice =
    "auto"`). `auto`: the parser of the model's family, none for an unknown family. Empty: none."""
    reasoning_parser: str = ""
    """Value of vLLM's `--reasoning-parser`, such as `qwen3` or `deepseek_r1`. Empty: reasoning stays in the reply's
    text."""
    env: dict[str, str] = {}
    """Further environment variables of that server."""
    max_loras: Count = 4
    """Adapters that a server holds at once; at least `trainer.max_staleness` + 2."""
    max_lora_rank: Count = 8
    """Largest rank of an adapter: 8, 16, 32, 64, 128, 256, 320 or 512."""
    max_model_len: Natural = 0
    """Longest prompt and reply together, in tokens. 0: the model's own limit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Which build of vLLM `journeyman up` expects. `auto`: the one that is installed."""
    start_timeout_s: Positive = 600.0
    """A server that is not ready after this time is killed and started again."""
