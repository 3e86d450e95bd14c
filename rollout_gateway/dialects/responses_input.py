"""From a request of OpenAI's `/v1/responses` to a chat completion request.

Its input is a list of items: messages, reasoning, tool calls and their outputs. What the assistant says in one turn is
several items here and one message in a chat completion, so `add_item` puts items into the last message where they
belong there. `responses` uses this for the policy's calls, and `rollout_gateway.outside` for the records of OpenAI's
own answers."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from rollout_gateway.dialects.calls import MAX_MESSAGES, MAX_TOOLS, Seed
from rollout_gateway.dialects.translate import message_content
from rollout_gateway.http.errors import ApiError, invalid_body

CUSTOM_INPUT = "input"
"""The only argument of a tool of type `custom`, which takes a text."""
_RUN_BY_OPENAI = ("code_interpreter", "file_search", "image_generation", "mcp", "tool_search", "web_search")
_RUN_BY_CLIENT = ("apply_patch", "computer", "computer_use", "local_shell", "shell")
HOSTED = frozenset((*_RUN_BY_OPENAI, *_RUN_BY_CLIENT, "computer_use_preview", "web_search_preview"))
"""Types of tools that OpenAI runs itself or defines by name only. The gateway can neither run them nor show their
schema to the model, so it leaves them out, as vLLM does."""


class ContentPart(msgspec.Struct):
    """A part of an item's content."""

    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | None = None

    def chat(self) -> dict[str, Any]:
        """Convert to a part of a chat message. Raises a 400 `ApiError` if there is none like it."""
        if self.image_url:
            return {"type": "image_url", "image_url": {"url": self.image_url}}
        if self.type in ("input_image", "input_file", "input_audio"):
            message = f"Content of type {self.type!r} is not supported, but for an input_image with an image_url."
            raise ApiError(400, "unsupported_content", message, param="input")
        return {"type": "text", "text": self.text or self.refusal}


class InputItem(msgspec.Struct):
    """An item of any type: its fields are those of all types that are translated."""

    type: str = "message"
    id: str | None = None
    role: str = ""
    content: str | list[ContentPart] | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: msgspec.Raw = msgspec.Raw(b'""')
    """A text or parts. Outputs of types that are refused have other forms."""
    summary: list[ContentPart] = []
    encrypted_content: str | None = None


class ToolParam(msgspec.Struct, omit_defaults=True):
    """A tool as the client defines it; of type `namespace`, a list of tools."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[ToolParam] | None = None


class TextParam(msgspec.Struct):
    format: dict[str, Any] | None = None


class ResponsesRequest(msgspec.Struct):
    """The fields of a request that are translated."""

    model: str
    input: str | Annotated[list[InputItem], MAX_MESSAGES]
    instructions: str | None = None
    tools: Annotated[list[ToolParam], MAX_TOOLS] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    text: TextParam | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    store: bool | None = None


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model is shown a tool of a namespace."""
    return f"{namespace}__{name}" if namespace else name


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the client knows it."""

    name: str
    namespace: str = ""
    custom: bool = False


class Tools:
    """The tools of a request."""

    def __init__(self, tools: Iterable[ToolParam]) -> None:
        """Convert a request's tools. Raises a 400 `ApiError` for an unknown type."""
        self.chat: list[dict[str, Any]] = []
        """Tools of the chat completion request."""
        self.names: dict[str, ToolName] = {}
        """The client's tools by the name that the model is shown."""
        self.left_out: list[str] = []
        """Types of tools that the model is not shown."""
        for tool in tools:
            self._add(tool)

    def _add(self, tool: ToolParam, namespace: str = "") -> None:
        """Add a tool, or the tools of a namespace. Raises a 400 `ApiError` for an unknown type."""
        if tool.type == "namespace" and not namespace:
            for inner in tool.tools or ():
                self._add(inner, tool.name)
        elif tool.type in ("function", "custom"):
            self._add_function(tool, namespace)
        elif tool.type in HOSTED or tool.type.startswith(("web_search", "computer")):
            if tool.type not in self.left_out:
                self.left_out.append(tool.type)
        else:
            message = f"Tools of type {tool.type!r} are not supported."
            raise ApiError(400, "unsupported_tool", message, param="tools")

    def _add_function(self, tool: ToolParam, namespace: str) -> None:
        """Add a function, or a custom tool as a function with one argument. `namespace`: empty if it is in none."""
        custom = tool.type == "custom"
        parameters = tool.parameters or {"type": "object"}
        if custom:
            parameters = {
                "type": "object",
                "properties": {CUSTOM_INPUT: {"type": "string"}},
                "required": [CUSTOM_INPUT],
                "additionalProperties": False,
            }
        flat = flat_name(namespace, tool.name)
        self.names[flat] = ToolName(tool.name, namespace, custom)
        function: dict[str, Any] = {"name": flat, "parameters": parameters}
        if tool.description:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        self.chat.append({"type": "function", "function": function})

    def chat_tool_choice(self, tool_choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Convert `tool_choice` to that of the chat completion; `None` for the default, or if there is no tool to
        choose. Raises a 400 `ApiError` for a choice that does not name a tool of the request."""
        if tool_choice is None or isinstance(tool_choice, str):
            return tool_choice if self.chat else None
        kind = str(tool_choice.get("type", ""))
        if kind == "allowed_tools":
            raise _invalid_choice("allowed_tools is not supported: send in `tools` what the model may call")
        if kind in self.left_out:
            raise _invalid_choice(f"tools of type {kind!r} are not supported")
        return {"type": "function", "function": {"name": self._shown_name(tool_choice)}}

    def _shown_name(self, tool: dict[str, Any]) -> str:
        """Return the name under which the model is shown a tool that a choice names. Raises a 400 `ApiError` unless it
        is one of the request's tools."""
        name, namespace = str(tool.get("name", "")), tool.get("namespace")
        flat = flat_name(namespace, name)
        if flat in self.names:
            return flat
        candidates = [] if namespace else [n for n, t in self.names.items() if t.name == name]
        if len(candidates) != 1:
            raise _invalid_choice(f"{len(candidates)} of the tools are named {name!r}, and it must be one")
        return candidates[0]


def _invalid_choice(why: str) -> ApiError:
    """Return the 400 for a `tool_choice` that can't be meant. `why`: the reason, as a clause."""
    return invalid_body(f"tool_choice is invalid: {why}.", "tool_choice")


_GOES_ON_IN_TURN = frozenset(("reasoning", "function_call", "custom_tool_call"))
"""Types of items after which a text of the assistant belongs to the same message. A text after a text begins
another."""


def add_item(messages: list[dict[str, Any]], item: InputItem, type_before: str = "") -> None:
    """Add an input item to the messages of a chat completion. `type_before`: the type of the item before it; empty for
    the first. Raises a 400 `ApiError` for an unknown type.

    Reasoning, text and tool calls of a turn are items of their own here, and one message in a chat completion."""
    match item.type:
        case "message" if item.role == "assistant":
            add_text(messages, _chat_content(item.content), type_before)
        case "message":
            # vLLM makes a system message of a developer's if the chat template knows no developer.
            messages.append({"role": item.role or "user", "content": _chat_content(item.content)})
        case "function_call":
            add_call(messages, item.call_id, flat_name(item.namespace, item.name), item.arguments)
        case "custom_tool_call":
            arguments = msgspec.json.encode({CUSTOM_INPUT: item.input}).decode()
            add_call(messages, item.call_id, flat_name(item.namespace, item.name), arguments)
        case "function_call_output" | "custom_tool_call_output":
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _chat_content(_tool_output(item))}
            )
        case "reasoning":
            add_reasoning(messages, _reasoning_text(item))
        case kind if kind.removesuffix("_call") in HOSTED:
            # Where the server ran the tool, the text that follows holds the result. What a client itself ran comes as
            # an item of its own, such as `shell_call_output`, and is refused below.
            pass
        case kind:
            message = f"Input of type {kind!r} is not supported."
            if (tool := kind.removesuffix("_call_output")) != kind and tool in HOSTED:
                message += (
                    f" The model is not shown tools of type {tool!r}, so it made no such call. Give it the tool as a "
                    "`function` or `custom` tool, or leave the output out."
                )
            raise ApiError(400, "unsupported_content", message, param="input")


def _last_assistant_message(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of the assistant at the end of `messages`, added now if another message or none is there."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def add_reasoning(messages: list[dict[str, Any]], text: str) -> None:
    """Add reasoning to the last message of the assistant. The model's chat template decides whether it is shown."""
    if not text:
        return
    message = _last_assistant_message(messages)
    # Items of reasoning in a row are paragraphs. One that follows text or a call is appended as it is.
    after_output = message["content"] is not None or "tool_calls" in message
    message["reasoning"] = ("" if after_output else "\n\n").join(filter(None, (message.get("reasoning"), text)))


def add_text(messages: list[dict[str, Any]], content: str | list[dict[str, Any]], type_before: str) -> None:
    """Add text to the last message of the assistant, or as a further message if that has a text of its own.
    `type_before`: the type of the item before it."""
    message = _last_assistant_message(messages)
    content_before = message["content"]
    if content_before is None:
        message["content"] = content
    elif type_before in _GOES_ON_IN_TURN and isinstance(content_before, str) and isinstance(content, str):
        message["content"] = content_before + content
    else:
        messages.append({"role": "assistant", "content": content})


def add_call(messages: list[dict[str, Any]], call_id: str, name: str, arguments: str) -> None:
    """Add a tool call to the last message of the assistant."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _last_assistant_message(messages).setdefault("tool_calls", []).append(call)


def encode_reasoning(reasoning: str) -> str:
    """Return reasoning in base64, for a client that asks for `reasoning.encrypted_content` to send it back. It is not
    encrypted: the client got the same text as the summary."""
    return base64.b64encode(reasoning.encode()).decode()


def _reasoning_text(item: InputItem) -> str:
    """Return the text of a reasoning item. Some clients keep the summary, others only what `encode_reasoning` wrote.
    Raises a 400 `ApiError` if that was written by another server."""
    parts = item.content if item.content and isinstance(item.content, list) else item.summary
    text = "".join(part.text for part in parts)
    if text or not item.encrypted_content:
        return text
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except ValueError as error:
        message = "A reasoning item's encrypted_content is none that this gateway wrote. Leave the item out."
        raise invalid_body(message, "input") from error


def _tool_output(item: InputItem) -> str | list[ContentPart]:
    """Return the output of a tool call. Raises a 400 `ApiError` for another form than a text or parts."""
    try:
        return msgspec.json.decode(item.output, type=str | list[ContentPart])
    except msgspec.ValidationError as error:
        raise invalid_body(f"The output of call {item.call_id!r} is not valid: {error}.", "input.output") from error


def _chat_content(content: str | list[ContentPart] | None) -> str | list[dict[str, Any]]:
    """Convert an item's content to that of a chat message."""
    if content is None or isinstance(content, str):
        return content or ""
    return message_content([part.chat() for part in content]) or ""


def response_format(text: TextParam | None) -> dict[str, Any] | None:
    """Convert `text.format` to `response_format`."""
    if text is None or text.format is None:
        return None
    schema = dict(text.format)
    kind = schema.pop("type", "text")
    return {"type": kind, "json_schema": schema} if kind == "json_schema" else {"type": kind}
