"""Between an agent that can't set them and the gateway: the tool that a model must call, and how it samples.

A call whose last message is the user's must call a tool; one that ends with a tool's result must not. A demo model of
0.8 M parameters would call no tool by itself, and ramble on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from tests.rollout_gateway.tap import tapped

_SAID: Any = {"name": "said", "strict": True, "schema": {"type": "string", "enum": ["a1 is mine", "b2 is mine"]}}
"""What it may say: a model of 1,024 positions hardly finds an end after thousands."""


def forced(path: str, body: dict[str, Any], tool: str, bias: dict[str, int]) -> dict[str, Any]:
    """The request with what it must do. `tool`: the end of the tool's name."""
    responses = path.endswith("/responses")
    turns = body["input"] if responses else body["messages"]
    answered = turns[-1].get("role") == "tool" or str(turns[-1].get("type")).endswith("_output")
    name = tool if responses else _name(body.get("tools") or [], tool)
    named: Any = {"type": "function", "name": name} if responses else {"type": "function", "function": {"name": name}}
    out = {**body, "logit_bias": bias, "temperature": 1.0}
    if answered and responses:
        out["text"] = {"format": {"type": "json_schema", **_SAID}}
    elif answered:
        out["response_format"] = {"type": "json_schema", "json_schema": _SAID}
    out["max_output_tokens" if responses else "max_tokens"] = 120
    for function in _functions(out.get("tools") or []):
        function["strict"] = True  # or the grammar knows no schema
    if name:
        out["tool_choice"] = "none" if answered else named
    return out


def _functions(tools: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for tool in tools:
        yield from _functions(tool.get("tools") or [])
        if tool["type"] == "function":
            yield tool.get("function", tool)


def _name(tools: list[dict[str, Any]], end: str) -> str:
    return next((str(t["function"]["name"]) for t in tools if t["function"]["name"].endswith(end)), "")


@contextlib.contextmanager
def forcing(url: str, tool: str, bias: dict[str, int]) -> Iterator[str]:
    """The URL to give to the agent in place of `url`."""
    there = urlsplit(url)
    with tapped(f"{there.scheme}://{there.netloc}", lambda path, body: forced(path, body, tool, bias)) as tap:
        yield tap.url + there.path
