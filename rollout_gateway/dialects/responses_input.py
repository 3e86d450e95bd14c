"""Requests of OpenAI's `/v1/responses` and their parts, as chat completions have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout_gateway.http.errors import ApiError

CUSTOM_INPUT = "input"
"""The one argument of a tool of type `custom`, which takes a text."""
HOSTED = frozenset(
    (
        "web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "computer_use",
        "computer_use_preview", "local_shell", "shell", "apply_patch", "mcp", "tool_search", "computer",
    )
)  # fmt: skip
"""Types of tools that OpenAI runs itself or defines by name only. There is nothing here to run them, and no schema to show to
the model, so they are left out, as vLLM does."""


class Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | None = None


class Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: str | list[Part] = ""


class Tool(msgspec.Struct, omit_defaults=True):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[Tool] | None = None


class TextSetting(msgspec.Struct):
    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct):
    model: str
    input: str | list[Item]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextSetting | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None


def flat_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class ToolName:
    """What a client calls a tool."""

    name: str
    namespace: str = ""
    custom: bool = False


@dataclass(slots=True)
class Tools:
    """A request's tools, for the model."""

    chat: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, ToolName] = field(default_factory=dict)
    """By the name that the model knows."""
    left_out: list[str] = field(default_factory=list)
    """Types of tools that the model is not shown."""

    @classmethod
    def of(cls, tools: list[Tool]) -> Tools:
        """Raises a 400 `ApiError` for a tool of a type that is unknown."""
        found = cls()
        for tool in tools:
            found._add(tool)
        return found

    @staticmethod
    def sent(chat: list[dict[str, Any]], names: dict[str, ToolName]) -> list[dict[str, Any]]:
        """Return the tools of a recorded chat request under the client's names, those of a namespace in it. `names` has those
        that the model knew by another name."""
        found: list[dict[str, Any]] = []
        spaces: dict[str, dict[str, Any]] = {}
        for tool in chat:
            made = {"type": "function", **tool["function"]}
            name = names.get(made["name"])
            if name is None:
                found.append(made)
                continue
            made["name"] = name.name
            if name.custom:
                made["type"] = "custom"
                del made["parameters"]
            if not name.namespace:
                found.append(made)
            elif name.namespace in spaces:
                spaces[name.namespace]["tools"].append(made)
            else:
                spaces[name.namespace] = {"type": "namespace", "name": name.namespace, "tools": [made]}
                found.append(spaces[name.namespace])
        return found

    def _add(self, tool: Tool, namespace: str = "") -> None:
        if tool.type == "namespace" and not namespace:
            for inner in tool.tools or ():
                self._add(inner, tool.name)
        elif tool.type == "function":
            self._add_function(tool, ToolName(tool.name, namespace), tool.parameters or {"type": "object"})
        elif tool.type == "custom":
            schema = {
                "type": "object", "properties": {CUSTOM_INPUT: {"type": "string"}}, "required": [CUSTOM_INPUT],
                "additionalProperties": False,
            }  # fmt: skip
            self._add_function(tool, ToolName(tool.name, namespace, custom=True), schema)
        elif tool.type in HOSTED or tool.type.startswith(("web_search", "computer")):
            if tool.type not in self.left_out:
                self.left_out.append(tool.type)
        else:
            raise ApiError(
                400,
                f"Tools of type {tool.type!r} can't be served here.",
                code="unsupported_tool",
                param="tools",
            )

    def _add_function(self, tool: Tool, name: ToolName, parameters: dict[str, Any]) -> None:
        flat = flat_name(name.namespace, tool.name)
        self.names[flat] = name
        function: dict[str, Any] = {"name": flat, "parameters": parameters}
        if tool.description:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        self.chat.append({"type": "function", "function": function})

    def choice(self, asked: str | dict[str, Any]) -> str | dict[str, Any] | None:
        """`tool_choice` of a request; none where nothing is left to choose from.

        Raises a 400 `ApiError` for a choice that names no tool."""
        if isinstance(asked, str):
            return asked if self.chat else None
        kind, name = str(asked.get("type", "")), str(asked.get("name", ""))
        if kind == "allowed_tools":
            return str(asked.get("mode", "auto")) if self.chat else None
        if kind in self.left_out:
            raise _unknown_choice(f"tools of type {kind!r} can't run here")
        wanted = flat_name(asked.get("namespace"), name)
        fitting = [n for n, t in self.names.items() if n == wanted] or [
            n for n, t in self.names.items() if t.name == name
        ]
        if len(fitting) != 1:
            raise _unknown_choice(f"{len(fitting)} of the tools are named {name!r}")
        return {"type": "function", "function": {"name": fitting[0]}}


def _unknown_choice(why: str) -> ApiError:
    return ApiError(400, f"tool_choice can't be met: {why}.", code="invalid_body", param="tool_choice")


def add_message(messages: list[dict[str, Any]], item: Item) -> None:
    match item.type:
        case "message":
            role = "system" if item.role == "developer" else item.role or "user"
            messages.append({"role": role, "content": _content(item.content)})
        case "function_call":
            call = {
                "id": item.call_id, "type": "function",
                "function": {"name": flat_name(item.namespace, item.name), "arguments": item.arguments},
            }  # fmt: skip
            _add_call(messages, call)
        case "custom_tool_call":
            written = msgspec.json.encode({CUSTOM_INPUT: item.input}).decode()
            call = {
                "id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": written}
            }  # fmt: skip
            _add_call(messages, call)
        case "function_call_output" | "custom_tool_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        case "reasoning":
            pass  # chat templates drop earlier thoughts too
        case kind if kind.removesuffix("_call") in HOSTED:
            pass  # what a hosted tool did elsewhere: its result is in the text that followed
        case other:
            raise ApiError(
                400,
                f"Input of type {other!r} can't be served here.",
                code="unsupported_content",
                param="input",
            )


def _add_call(messages: list[dict[str, Any]], call: dict[str, Any]) -> None:
    # Calls of one turn, and the text before them, are one message of chat's.
    if messages and messages[-1]["role"] == "assistant":
        messages[-1].setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})


def _content(content: str | list[Part] | None) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.image_url for part in content):
        return [
            {"type": "image_url", "image_url": {"url": part.image_url}}
            if part.image_url
            else {"type": "text", "text": part.text}
            for part in content
        ]
    return "\n".join(part.text or part.refusal for part in content)
