"""Make a model say what a teacher said: parameters of a call that allow one reply only.

vLLM can restrict what a model samples (guided decoding): to one of several texts, or to arguments of a tool that fit a
schema. With a single text, or constants for arguments, the model's reply is the teacher's, with the model's own
probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, cast

from openai.types.chat import ChatCompletion, ChatCompletionToolParam

from journeywork.art.errors import UnsupportedError


def freeze_tool_schema(tool: Any, fixed_args: dict[str, Any]) -> ChatCompletionToolParam:
    """Return a copy of a tool whose parameters allow `fixed_args` only."""
    frozen = deepcopy(tool)
    frozen["function"]["parameters"] = {
        "type": "object",
        "properties": {name: {"const": value} for name, value in fixed_args.items()},
        "required": list(fixed_args),
        "title": f"{tool['function']['name'].title()}FrozenArgs",
    }
    return cast(ChatCompletionToolParam, frozen)


def get_guided_completion_params(
    completion: ChatCompletion, base_tools: Iterable[ChatCompletionToolParam] | None = None
) -> tuple[list[str] | None, dict[str, Any] | None, list[ChatCompletionToolParam] | None]:
    """Return `(guided_choice, tool_choice, tools)` with which a student repeats the first choice of `completion`.

    A reply in words gives `guided_choice` only; a tool call the others. Raises `ValueError` for a tool that is not
    among `base_tools`, and `UnsupportedError` for a tool that is no function."""
    message = completion.choices[0].message
    if not message.tool_calls:
        return [message.content or ""], None, None
    call = message.tool_calls[0]
    if call.type != "function":
        raise UnsupportedError(f"a call of the {call.type} tool can't be guided: use function tools")
    tool: Any = next((t for t in base_tools or () if cast(Any, t)["function"]["name"] == call.function.name), None)
    if tool is None:
        raise ValueError(f"the completion calls {call.function.name!r}, which is not in `base_tools`")
    frozen = freeze_tool_schema(tool, json.loads(call.function.arguments))
    return None, {"type": "function", "function": {"name": call.function.name}}, [frozen]
