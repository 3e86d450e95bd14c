"""From a request of Anthropic's `/v1/messages` to the messages and tools of a chat completion request.

The structs are the parts of a request that are translated; msgspec refuses other types with a 400. A message's content
is a list of blocks. `messages` uses this for the policy's calls, and `rollout_gateway.outside` for the records of
Anthropic's own answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from rollout_gateway.dialects.calls import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, Seed
from rollout_gateway.dialects.translate import message_content
from rollout_gateway.http.errors import ApiError, invalid_body

_ATTRIBUTION = "x-anthropic-billing-header"
"""How the line begins in which Claude Code names its version and a hash of the call."""


class _Source(msgspec.Struct):
    """The `source` of an image or a document."""

    type: str = ""
    media_type: str = "image/png"
    data: str = ""
    url: str = ""

    @property
    def image_url(self) -> str:
        """`url`, or `data` as a data URL, for these two values of `type`; else empty. `media_type` is not checked."""
        if self.type == "url":
            return self.url
        return f"data:{self.media_type};base64,{self.data}" if self.type == "base64" and self.data else ""


class _ToolParam(msgspec.Struct):
    """A tool of a request."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] = {}
    strict: bool | None = None
    defer_loading: bool | None = None
    """The model is not shown the tool before the result of a search refers to it (`tool_reference`)."""

    def __post_init__(self) -> None:
        if self.type not in (None, "custom") and not self.input_schema:
            message = (
                f"The tool {self.name!r} has the type {self.type!r}, which only Anthropic's models and servers know. "
                "Leave it out, or define it with a `description` and an `input_schema`, and run it yourself."
            )
            raise ApiError(400, "unsupported_tool", message, param="tools")

    def as_chat_tool(self) -> dict[str, Any]:
        """Return the tool as a chat completion request defines it. A schema without a type gets `object`, since
        arguments are an object."""
        parameters = self.input_schema if "type" in self.input_schema else {**self.input_schema, "type": "object"}
        function: dict[str, Any] = {"name": self.name, "description": self.description or "", "parameters": parameters}
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class _ToolChange(msgspec.Struct):
    """A tool that a system message adds or removes: by the name of one of the request's tools, or by its definition."""

    name: str = ""
    definition: _ToolParam | None = None


class _Block(msgspec.Struct):
    """A block of any type: its fields are those of all types."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    is_error: bool | None = None
    content: str | list[_Block] | None = None
    source: _Source | None = None
    title: str | None = None
    context: str | None = None
    tool: _ToolChange | None = None

    def __post_init__(self) -> None:
        if self.type == "image" and not (self.source and self.source.image_url):
            raise ValueError("an image needs a source of type `base64` with `data`, or `url` with `url`")


class InputMessage(msgspec.Struct):
    """A message of a request."""

    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


_Tools = dict[str, _ToolParam]
"""Tools of a request by name."""


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputFormat(msgspec.Struct):
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct):
    format: _OutputFormat | None = None


class MessagesRequest(msgspec.Struct):
    """The fields of a request that are translated."""

    model: str
    messages: Annotated[list[InputMessage], MAX_MESSAGES]
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: Annotated[list[_ToolParam], MAX_TOOLS] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Annotated[list[str], MAX_STOPS] | None = None
    output_config: _OutputConfig | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    stream: bool | None = None


def _arguments_text(value: Any) -> str:
    """Return a tool call's `input` as JSON text. Malformed arguments, which `messages` wrapped as `_raw` and Claude
    Code as `__unparsedToolInput`, are returned as the model wrote them."""
    match value:
        case {"_raw": str(text), **others} | {"__unparsedToolInput": str(text), **others} if not others:
            return text
    return msgspec.json.encode(value or {}).decode()


def tools_of(request: MessagesRequest) -> tuple[_Tools, set[str]]:
    """Return all tools of a request, also those that a later system message added, and the names of those that one
    removed. Raises a 400 `ApiError` for a name that the request does not define."""
    tools, removed = {tool.name: tool for tool in request.tools or ()}, set[str]()
    for block in (b for m in request.messages if not isinstance(m.content, str) for b in m.content):
        if block.type not in ("tool_addition", "tool_removal") or (change := block.tool) is None:
            continue
        added = change.definition or tools.get(change.name)
        if added is None:
            message = f"A {block.type} names the tool {change.name!r}, which `tools` does not define."
            raise invalid_body(message, "messages")
        if block.type == "tool_addition":
            tools[added.name] = msgspec.structs.replace(added, defer_loading=False)
            removed.discard(added.name)
        else:
            removed.add(added.name)
    return tools, removed


def system_text(content: str | list[_Block] | None) -> str:
    """Return the text of a system prompt, without the line that begins with `_ATTRIBUTION`: it would change the prompt
    with each call. vLLM leaves it out too."""
    texts = [content] if isinstance(content, str) else [b.text for b in content or () if b.type == "text"]
    return "\n".join(
        rest
        for text in filter(None, texts)
        if (rest := text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text)
    )


def chat_messages(message: InputMessage, tools: _Tools) -> list[dict[str, Any]]:
    """Convert a message of the user or the assistant to chat messages. Each tool result in it becomes a separate
    message."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    out: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning = ""
    for block in message.content:
        match block.type:
            case "tool_use":
                function = {"name": block.name or "", "arguments": _arguments_text(block.input)}
                calls.append({"id": block.id or "", "type": "function", "function": function})
            case "tool_result":
                result = _result_content(block, tools)
                out.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": result})
            case "thinking":
                reasoning += block.thinking or ""
            case "redacted_thinking":
                pass  # only its author can read it, and the gateway writes none
            case "text" if not block.text:
                pass
            case _:
                parts.append(_chat_part(block, tools))
    if parts or message.role == "assistant":
        # The assistant's text is one in a chat completion, and in blocks where it came between calls.
        content = message_content(parts, "" if message.role == "assistant" else "\n")
        chat_message: dict[str, Any] = {"role": message.role, "content": content}
        if reasoning:
            chat_message["reasoning"] = reasoning  # the model's chat template decides whether it is shown
        if calls:
            chat_message["tool_calls"] = calls
        out.append(chat_message)
    return out


def _chat_part(block: _Block, tools: _Tools) -> dict[str, Any]:
    """Convert a block that is text, an image, a document in text or a reference to one of `tools`. Raises a 400
    `ApiError` for another one."""
    source = block.source or _Source()
    match block.type, source.type:
        case "text", _:
            return {"type": "text", "text": block.text or ""}
        case "image", _:
            return {"type": "image_url", "image_url": {"url": source.image_url}}
        case "document", "text":
            texts = (block.title, block.context, source.data)
            return {"type": "text", "text": "\n".join(text for text in texts if text)}
        case "tool_reference", _ if tool := tools.get(block.tool_name or ""):
            # The definition stands where it was found: among the tools, it would change the beginning of the prompt.
            return {"type": "text", "text": msgspec.json.encode(tool.as_chat_tool()).decode()}
        case "document", kind:
            message = f"A document with a source of type {kind!r} is not supported: send its text."
        case kind, _:
            message = f"Content of type {kind!r} is not supported."
    raise ApiError(400, "unsupported_content", message, param="messages")


def _result_content(block: _Block, tools: _Tools) -> str | list[dict[str, Any]]:
    """Return the content of a tool's result for a chat message. A chat completion has no field for a failed tool, so
    the text says it. Raises a 400 `ApiError` for a block that `_chat_part` does not support."""
    if isinstance(block.content, str):
        content: str | list[dict[str, Any]] = block.content
    else:
        content = message_content([_chat_part(inner, tools) for inner in block.content or ()]) or ""
    if not block.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error:"}, *content]
