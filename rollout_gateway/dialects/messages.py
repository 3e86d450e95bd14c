"""Anthropic's `/v1/messages` as chat completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from rollout_gateway.dialects.calls import Call
from rollout_gateway.dialects.translate import chat_call, chat_request, sampling_fields, sse
from rollout_gateway.http.body import read_body
from rollout_gateway.http.errors import ApiError

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: str | list[_Block] | None = None
    source: dict[str, Any] | None = None


class _InputMessage(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _ToolParam(msgspec.Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class _MessagesRequest(msgspec.Struct):
    model: str
    messages: list[_InputMessage]
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: list[_ToolParam] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False


class MessagesTranslation:
    """One call of `/v1/messages`. Raises a 400 `ApiError` for an invalid body."""

    path: ClassVar[str] = "/v1/messages"

    def __init__(self, body: bytes) -> None:
        self.request = read_body(body, _MessagesRequest)
        self._sampling = sampling_fields(body)
        self._index = 0
        """Index of the content block that is being streamed."""
        self._block = ""
        """Type of the open block. Empty between blocks."""
        self._tool = -1
        """Index of the tool call that is being streamed."""
        self._stop_reason = "end_turn"
        self._stop_sequence: str | None = None
        self._usage: dict[str, int] = {}
        self._started = False

    def chat(self) -> dict[str, Any]:
        """Return the chat completion request."""
        request = self.request
        messages: list[dict[str, Any]] = []
        if request.system:
            messages.append({"role": "system", "content": _text(request.system)})
        for message in request.messages:
            messages += _chat_messages(message)
        chat = chat_request(request, messages, self._sampling)
        if request.max_tokens is not None:
            chat["max_tokens"] = request.max_tokens
        if request.stop_sequences:
            chat["stop"] = request.stop_sequences
        if request.tools:
            chat["tools"] = [_chat_tool(tool) for tool in request.tools]
            choice = request.tool_choice or _ToolChoice()
            chat["tool_choice"] = {
                "auto": "auto", "any": "required", "none": "none",
                "tool": {"type": "function", "function": {"name": choice.name}},
            }[choice.type]  # fmt: skip
            if choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
        return chat

    def call(self) -> Call:
        """Return the call for the inference server, as `chat` has it."""
        return chat_call(self.chat(), self.path)

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        """Return the message of a whole chat completion."""
        choice = completion["choices"][0]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        if message.get("reasoning"):
            content.append({"type": "thinking", "thinking": message["reasoning"], "signature": ""})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], _arguments(call["function"]["arguments"])
            content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        return {
            **self._head(completion),
            "content": content,
            "stop_reason": _stop_reason(choice, bool(message.get("tool_calls"))),
            "stop_sequence": _stop_sequence(choice),
            "usage": _usage(completion.get("usage") or {}),
        }

    def _head(self, completion: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "msg_" + str(completion.get("id", "")).rpartition("-")[2], "type": "message", "role": "assistant",
            "model": completion.get("model", self.request.model),
        }  # fmt: skip

    @staticmethod
    def error(body: bytes, status: int) -> bytes:
        return messages_error(body, status)

    # -- a stream ------------------------------------------------------------------------------------------------

    def take(self, chunk: dict[str, Any]) -> bytes:
        """Return the events of a chunk."""
        out = b""
        if not self._started:
            self._started = True
            message = {
                **self._head(chunk), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage({})
            }  # fmt: skip
            out += _event("message_start", message=message)
        if usage := chunk.get("usage"):
            self._usage = _usage(usage)
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("reasoning"):
                out += self._in_block({"type": "thinking", "thinking": "", "signature": ""})
                out += self._delta({"type": "thinking_delta", "thinking": delta["reasoning"]})
            if delta.get("content"):
                out += self._in_block({"type": "text", "text": ""})
                out += self._delta({"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls") or ():
                out += self._call_delta(call)
            if choice.get("finish_reason"):
                self._stop_reason = _stop_reason(choice, self._tool >= 0)
                self._stop_sequence = _stop_sequence(choice)
        return out

    def end(self) -> bytes:
        """Return the last events."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        last = _event("message_delta", delta=delta, usage=self._usage or {"output_tokens": 0})
        return self._close_block() + last + _event("message_stop")

    def stream_error(self, error: dict[str, Any]) -> bytes:
        """Return the last event of a stream that failed."""
        status = 503 if error.get("code") == "stopping" else 500
        return sse("error", _error(error, status))

    def _call_delta(self, call: dict[str, Any]) -> bytes:
        function = call.get("function") or {}
        out = b""
        if call["index"] != self._tool:
            self._tool = call["index"]
            out += self._close_block()
            name = function.get("name", "")
            out += self._in_block({"type": "tool_use", "id": call.get("id", ""), "name": name, "input": {}})
        if function.get("arguments"):
            out += self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        return out

    def _in_block(self, start: dict[str, Any]) -> bytes:
        """Begin a content block of the type of `start`, unless one is open."""
        if self._block == start["type"]:
            return b""
        out = self._close_block()
        self._block = start["type"]
        return out + _event("content_block_start", index=self._index, content_block=start)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close_block(self) -> bytes:
        if not self._block:
            return b""
        self._block = ""
        self._index += 1
        return _event("content_block_stop", index=self._index - 1)


def messages_error(body: bytes, status: int) -> bytes:
    """Convert an error from OpenAI's format to Anthropic's."""
    return msgspec.json.encode(_error(msgspec.json.decode(body)["error"], status))


def _error(error: dict[str, Any], status: int) -> dict[str, Any]:
    kind = _ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.get("message")}}


def _event(kind: str, **data: Any) -> bytes:
    return sse(kind, {"type": kind, **data})


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    return {
        "input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)
    }  # fmt: skip


def _stop_reason(choice: dict[str, Any], has_calls: bool) -> str:
    if _stop_sequence(choice) is not None:
        return "stop_sequence"
    reason = choice.get("finish_reason") or "stop"
    return "tool_use" if has_calls and reason == "stop" else _STOP_REASONS.get(reason, "end_turn")


def _stop_sequence(choice: dict[str, Any]) -> str | None:
    stopped_by = choice.get("stop_reason")
    return stopped_by if isinstance(stopped_by, str) else None


def _arguments(text: str) -> dict[str, Any]:
    """Decode a tool call's arguments. What is not a JSON object, as small models may write, is kept as `_raw`."""
    try:
        value = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        value = text
    return value if isinstance(value, dict) else {"_raw": value}


def _text(content: str | list[_Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if block.type == "text")


def _chat_tool(tool: _ToolParam) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name, "description": tool.description, "parameters": tool.input_schema
    }  # fmt: skip
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _chat_messages(message: _InputMessage) -> list[dict[str, Any]]:
    """Convert a message. Each tool result in it becomes a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    out: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in message.content:
        match block.type:
            case "text":
                parts.append({"type": "text", "text": block.text})
            case "image":
                parts.append({"type": "image_url", "image_url": {"url": _image_url(block.source or {})}})
            case "tool_use":
                function = {"name": block.name, "arguments": msgspec.json.encode(block.input or {}).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "tool_result":
                out.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
                )
            case "thinking" | "redacted_thinking":
                pass  # chat templates drop earlier reasoning too
            case other:
                raise ApiError(
                    400, f"Content of type {other!r} is not supported.", code="unsupported_content"
                )
    if parts or calls:
        joined = "\n".join(part.get("text", "") for part in parts) or None
        content = joined if all(part["type"] == "text" for part in parts) else parts
        out.append({"role": message.role, "content": content, **({"tool_calls": calls} if calls else {})})
    return out


def _image_url(source: dict[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"
