"""Translates Anthropic's `/v1/messages` to chat completions and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.dialects.calls import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, Seed
from rollout_gateway.dialects.translate import Translation, joined
from rollout_gateway.http.errors import ApiError

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class _BlockFormat(NamedTuple):
    """How Anthropic's API writes a content block."""

    type: str
    empty: dict[str, Any]
    """Fields of a block without content."""
    delta_type: str
    """Type of a streamed piece of the block."""
    delta_field: str
    """Field of such a piece that holds its text."""


_BLOCKS = {
    "reasoning": _BlockFormat("thinking", {"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "content": _BlockFormat("text", {"text": ""}, "text_delta", "text"),
    "tool": _BlockFormat("tool_use", {"input": {}}, "input_json_delta", "partial_json"),
}
"""The format of a block by its kind (`Translation.open`)."""
_FORMATS = {form.type: form for form in _BLOCKS.values()}

_ATTRIBUTION = "x-anthropic-billing-header"
_ERROR_BYTES = 500
"""Number of bytes of an answer in an unknown format that become the message of the error."""


class _OpenAiError(msgspec.Struct):
    error: dict[str, Any]


class _Source(msgspec.Struct):
    """Of an image or a document."""

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

    def chat(self) -> dict[str, Any]:
        parameters = (
            self.input_schema if "type" in self.input_schema else {**self.input_schema, "type": "object"}
        )
        function: dict[str, Any] = {
            "name": self.name, "description": self.description or "", "parameters": parameters
        }  # fmt: skip
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class _ToolChange(msgspec.Struct):
    """A tool that a system message adds or removes: by the name of one of the request's tools, or by its definition."""

    name: str = ""
    definition: _ToolParam | None = None


class _Block(msgspec.Struct):
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


class _InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


_Tools = dict[str, _ToolParam]
"""Tools of a request by name."""


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _OutputFormat(msgspec.Struct):
    schema: dict[str, Any] | None = None


class _OutputConfig(msgspec.Struct):
    format: _OutputFormat | None = None


class _MessagesRequest(msgspec.Struct):
    model: str
    messages: Annotated[list[_InputMessage], MAX_MESSAGES]
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: Annotated[list[_ToolParam], MAX_TOOLS] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: Annotated[list[str], MAX_STOPS] | None = None
    output_config: _OutputConfig | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Seed | None = None
    stream: bool | None = None


class MessagesTranslation(Translation):
    """One call of `/v1/messages`."""

    path = "/v1/messages"
    kind = _MessagesRequest
    dropped = frozenset((
        "billing_policy", "cache_control", "context_management", "diagnostics", "fallback_credit_token",
        "inference_geo", "metadata", "service_tier", "speed", "thinking", "user_profile_id", "workspace_id",
    ))  # fmt: skip
    request: _MessagesRequest
    _system_first = False
    """System messages further on are put into the first one."""

    def merge_system(self) -> bool:
        changes = not self._system_first and any(m.role == "system" for m in self.request.messages)
        self._system_first = True
        return changes

    def chat(self, exchanges: Mapping[str, ExchangeRecorded] | None = None) -> dict[str, Any]:
        request = self.request
        messages: list[dict[str, Any]] = []
        system = [_system_text(request.system)]
        tools, removed = _tools(request)
        for message in request.messages:
            if message.role != "system":
                messages += _chat_messages(message, tools)
            elif self._system_first:
                system.append(_system_text(message.content))
            elif text := _system_text(message.content):
                messages.append({"role": "system", "content": text})
        if text := "\n".join(filter(None, system)):
            messages.insert(0, {"role": "system", "content": text})
        chat = self._chat(messages, request.max_tokens)
        if request.stop_sequences:
            chat["stop"] = request.stop_sequences
        if request.output_config and (form := request.output_config.format) and form.schema:
            json_schema = {"name": "output", "schema": form.schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        if shown := [t.chat() for t in tools.values() if not t.defer_loading and t.name not in removed]:
            chat["tools"] = shown
            choice = request.tool_choice or _ToolChoice()
            chat["tool_choice"] = {
                "auto": "auto", "any": "required", "none": "none",
                "tool": {"type": "function", "function": {"name": choice.name}},
            }[choice.type]  # fmt: skip
            if choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
        return chat

    def whole(self) -> dict[str, Any]:
        return {
            "id": "msg_" + self.id.partition("-")[2], "type": "message", "role": "assistant",
            "model": self.head.get("model", self.request.model), "content": self.blocks, **self._stop(),
            "usage": _usage(self.usage),
        }  # fmt: skip

    def begin(self) -> bytes:
        empty: dict[str, Any] = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None),
        }
        return self.event("message_start", message=self.whole() | empty)

    def open(self, kind: str, call_id: str, name: str) -> bytes:
        form = _BLOCKS[kind]
        tool = {"id": call_id, "name": name} if kind == "tool" else {}
        block = {"type": form.type, **tool, **form.empty}
        self.blocks.append(block)
        if not self.streams:
            return b""
        return self.event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def delta(self, place: int, text: str) -> bytes:
        form = _FORMATS[self.blocks[place]["type"]]
        piece = {"type": form.delta_type, form.delta_field: text}
        return self.event("content_block_delta", index=place, delta=piece)

    def complete(self, place: int) -> bytes:
        block, text = self.blocks[place], self.text(place)
        match block["type"]:
            case "tool_use":
                block["input"] = _arguments(text)
            case kind:
                block[kind] = text
        return self.event("content_block_stop", index=place) if self.streams else b""

    def end(self) -> bytes:
        out = self.close()
        out += self.event("message_delta", delta=self._stop(), usage=_usage(self.usage))
        return out + self.event("message_stop")

    def stream_error(self, error: dict[str, Any]) -> bytes:
        status = 503 if error.get("code") == "stopping" else 500
        return self.event("error", error=_error(error, status)["error"])

    def error(self, body: bytes, status: int) -> bytes:
        return messages_error(body, status)

    def _stop(self) -> dict[str, str | None]:
        """Return the fields that tell why the model stopped."""
        sequence, reason = self.ended.get("stop_reason"), self.ended.get("finish_reason") or "stop"
        if isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        called = reason == "stop" and any(block["type"] == "tool_use" for block in self.blocks)
        reason = "tool_use" if called else _STOP_REASONS.get(reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}


def messages_error(body: bytes, status: int) -> bytes:
    """Convert an error from OpenAI's format to Anthropic's.

    If the body is not in OpenAI's format, for example the text of a proxy, its beginning becomes the message."""
    try:
        error = msgspec.json.decode(body, type=_OpenAiError).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = {"message": body[:_ERROR_BYTES].decode(errors="replace")}
    return msgspec.json.encode(_error(error, status))


def _error(error: dict[str, Any], status: int) -> dict[str, Any]:
    kind = _ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.get("message")}}


def _usage(usage: dict[str, Any] | None) -> dict[str, int]:
    usage = usage or {}
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "output_tokens": usage.get("completion_tokens") or 0,
    }


def _arguments(text: str) -> dict[str, Any]:
    """Decode a tool call's arguments. If they are not a JSON object, which small models may write, return them as the
    field `_raw`. `_arguments_text` gives the model its own text again."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"_raw": text}


def _arguments_text(value: Any) -> str:
    """Encode a tool call's arguments. The text of malformed ones, which `_arguments` or a client marked as such, stays
    as the model wrote it."""
    match value:
        case {"_raw": str(text), **others} | {"__unparsedToolInput": str(text), **others} if not others:
            return text
    return msgspec.json.encode(value or {}).decode()


def _tools(request: _MessagesRequest) -> tuple[_Tools, set[str]]:
    """All tools of a request, and the names of those that a system message removed. Raises a 400 `ApiError`."""
    tools, removed = {tool.name: tool for tool in request.tools or ()}, set[str]()
    for block in (b for m in request.messages if not isinstance(m.content, str) for b in m.content):
        if block.type not in ("tool_addition", "tool_removal") or (change := block.tool) is None:
            continue
        added = change.definition or tools.get(change.name)
        if added is None:
            message = f"A {block.type} names the tool {change.name!r}, which `tools` does not define."
            raise ApiError(400, "invalid_body", message, param="messages")
        if block.type == "tool_addition":
            tools[added.name] = msgspec.structs.replace(added, defer_loading=False)
            removed.discard(added.name)
        else:
            removed.add(added.name)
    return tools, removed


def _system_text(content: str | list[_Block] | None) -> str:
    """The text of a system prompt, without the line in which Claude Code names its version and a hash of the call: it
    would change the prompt with each call. vLLM leaves it out too."""
    texts = [content] if isinstance(content, str) else [b.text for b in content or () if b.type == "text"]
    return "\n".join(
        rest
        for text in filter(None, texts)
        if (rest := text.partition("\n")[2] if text.startswith(_ATTRIBUTION) else text)
    )


def _chat_messages(message: _InputMessage, tools: _Tools) -> list[dict[str, Any]]:
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
                result = _result(block, tools)
                out.append({"role": "tool", "tool_call_id": block.tool_use_id or "", "content": result})
            case "thinking":
                reasoning += block.thinking or ""
            case "redacted_thinking":
                pass  # only its author can read it, and the gateway writes none
            case "text" if not block.text:
                pass
            case _:
                parts.append(_part(block, tools))
    if parts or message.role == "assistant":
        # The assistant's text is one in a chat completion, and in blocks where it came between calls.
        content = joined(parts, "" if message.role == "assistant" else "\n")
        said: dict[str, Any] = {"role": message.role, "content": content}
        if reasoning:
            said["reasoning"] = reasoning  # the model's chat template decides whether it is shown
        if calls:
            said["tool_calls"] = calls
        out.append(said)
    return out


def _part(block: _Block, tools: _Tools) -> dict[str, Any]:
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
            return {"type": "text", "text": msgspec.json.encode(tool.chat()).decode()}
        case "document", kind:
            message = f"A document with a source of type {kind!r} is not supported: send its text."
        case kind, _:
            message = f"Content of type {kind!r} is not supported."
    raise ApiError(400, "unsupported_content", message, param="messages")


def _result(block: _Block, tools: _Tools) -> str | list[dict[str, Any]]:
    """The content of a tool's result. A chat completion has no field for a failed tool, so the text says it."""
    if isinstance(block.content, str):
        content: str | list[dict[str, Any]] = block.content
    else:
        content = joined([_part(inner, tools) for inner in block.content or ()]) or ""
    if not block.is_error:
        return content
    if isinstance(content, str):
        return f"Error: {content}"
    return [{"type": "text", "text": "Error:"}, *content]
