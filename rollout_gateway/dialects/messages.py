"""Anthropic's `/v1/messages`, as chat completions and back."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from rollout_gateway.dialects.translate import parsed_arguments, passed, read, sse
from rollout_gateway.http.errors import ApiError

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
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


class _Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}
    strict: bool | None = None


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class _Request(msgspec.Struct):
    model: str
    messages: list[_Message]
    max_tokens: int | None = None
    system: str | list[_Block] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False


class MessagesTranslation:
    """One call of `/v1/messages`."""

    path: ClassVar[str] = "/v1/messages"

    def __init__(self, body: bytes) -> None:
        self.request = read(body, _Request)
        self._passed = passed(body)
        self._blocks = 0
        self._open = ""
        """Type of the content block that is being streamed."""
        self._tool = -1
        self._finish = "end_turn"
        self._usage: dict[str, int] = {}
        self._started = False

    def chat(self) -> dict[str, Any]:
        asked = self.request
        messages: list[dict[str, Any]] = []
        if asked.system:
            messages.append({"role": "system", "content": _text(asked.system)})
        for message in asked.messages:
            messages += _chat_messages(message)
        out: dict[str, Any] = {
            "model": asked.model,
            "messages": messages,
            "stream": asked.stream,
            **self._passed,
        }
        if asked.stream:
            out["stream_options"] = {"include_usage": True}
        for name in ("max_tokens", "temperature", "top_p", "top_k"):
            if (value := getattr(asked, name)) is not None:
                out[name] = value
        if asked.stop_sequences:
            out["stop"] = asked.stop_sequences
        if asked.tools:
            out["tools"] = [_chat_tool(tool) for tool in asked.tools]
            choice = asked.tool_choice or _ToolChoice()
            out["tool_choice"] = {
                "auto": "auto", "any": "required", "none": "none",
                "tool": {"type": "function", "function": {"name": choice.name}},
            }[choice.type]  # fmt: skip
            if choice.disable_parallel_tool_use:
                out["parallel_tool_calls"] = False
        return out

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        choice = completion["choices"][0]
        message = choice["message"]
        content: list[dict[str, Any]] = []
        if message.get("reasoning"):
            content.append({"type": "thinking", "thinking": message["reasoning"], "signature": ""})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            content.append({
                "type": "tool_use", "id": call["id"], "name": function["name"],
                "input": parsed_arguments(function["arguments"]),
            })  # fmt: skip
        usage = completion.get("usage") or {}
        return {
            **self._envelope(completion),
            "content": content,
            "stop_reason": _stop_reason(choice, bool(message.get("tool_calls"))),
            "stop_sequence": _stop_sequence(choice),
            "usage": {
                "input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)
            },
        }  # fmt: skip

    def _envelope(self, completion: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": "msg_" + str(completion.get("id", "")).rpartition("-")[2], "type": "message", "role": "assistant",
            "model": completion.get("model", self.request.model),
        }  # fmt: skip

    # -- streaming

    def begin(self) -> bytes:
        return b""

    def take(self, chunk: dict[str, Any]) -> bytes:
        out = b""
        if not self._started:
            self._started = True
            start = {
                **self._envelope(chunk), "content": [], "stop_reason": None, "stop_sequence": None,
                "usage": {"input_tokens": 0, "output_tokens": 0},
            }  # fmt: skip
            out += sse("message_start", {"type": "message_start", "message": start})
        if usage := chunk.get("usage"):
            self._usage = {
                "input_tokens": usage["prompt_tokens"],
                "output_tokens": usage["completion_tokens"],
            }
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("reasoning"):
                out += self._in_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                out += self._delta({"type": "thinking_delta", "thinking": delta["reasoning"]})
            if delta.get("content"):
                out += self._in_block("text", {"type": "text", "text": ""})
                out += self._delta({"type": "text_delta", "text": delta["content"]})
            for call in delta.get("tool_calls") or ():
                out += self._tool_delta(call)
            if choice.get("finish_reason"):
                self._finish = _stop_reason(choice, self._tool >= 0)
                self._stop_sequence = _stop_sequence(choice)
        return out

    def _tool_delta(self, call: dict[str, Any]) -> bytes:
        function = call.get("function") or {}
        out = b""
        if call["index"] != self._tool:
            self._tool = call["index"]
            out += self._close_block()
            start = {
                "type": "tool_use",
                "id": call.get("id", ""),
                "name": function.get("name", ""),
                "input": {},
            }
            out += self._in_block("tool_use", start)
        if function.get("arguments"):
            out += self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        return out

    def _in_block(self, kind: str, start: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        out = self._close_block()
        self._open = kind
        event = {"type": "content_block_start", "index": self._blocks, "content_block": start}
        return out + sse("content_block_start", event)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._blocks, "delta": delta}
        return sse("content_block_delta", event)

    def _close_block(self) -> bytes:
        if not self._open:
            return b""
        out = sse("content_block_stop", {"type": "content_block_stop", "index": self._blocks})
        self._open = ""
        self._blocks += 1
        return out

    _stop_sequence: str | None = None

    def end(self) -> bytes:
        delta = {"stop_reason": self._finish, "stop_sequence": self._stop_sequence}
        last = {"type": "message_delta", "delta": delta, "usage": self._usage or {"output_tokens": 0}}
        return (
            self._close_block() + sse("message_delta", last) + sse("message_stop", {"type": "message_stop"})
        )

    def error(self, body: bytes, status: int) -> bytes:
        return messages_error(body, status)

    def stream_error(self, error: dict[str, Any]) -> bytes:
        kind = _ERRORS.get(503, "api_error") if error.get("code") == "stopping" else "api_error"
        return sse("error", _error({**error, "type": kind}))


def messages_error(body: bytes, status: int) -> bytes:
    """An error in OpenAI's format, in Anthropic's."""
    error = msgspec.json.decode(body)["error"]
    return msgspec.json.encode(_error({**error, "type": _ERRORS.get(status, "api_error")}))


def _error(error: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": error.get("type") or "api_error", "message": error.get("message")},
    }


def _stop_reason(choice: dict[str, Any], tools: bool) -> str:
    if _stop_sequence(choice) is not None:
        return "stop_sequence"
    reason = choice.get("finish_reason") or "stop"
    return "tool_use" if tools and reason == "stop" else _STOP.get(reason, "end_turn")


def _stop_sequence(choice: dict[str, Any]) -> str | None:
    stopped_by = choice.get("stop_reason")
    return stopped_by if isinstance(stopped_by, str) else None


def _text(content: str | list[_Block] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content if block.type == "text")


def _chat_tool(tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {
        "name": tool.name, "description": tool.description, "parameters": tool.input_schema
    }  # fmt: skip
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _chat_messages(message: _Message) -> list[dict[str, Any]]:
    """One message of theirs is several of chat's where it holds tool results."""
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
                parts.append({"type": "image_url", "image_url": {"url": _image_url(block)}})
            case "tool_use":
                arguments = msgspec.json.encode(block.input or {}).decode()
                function = {"name": block.name, "arguments": arguments}
                calls.append({"id": block.id, "type": "function", "function": function})
            case "tool_result":
                out.append(
                    {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
                )
            case "thinking" | "redacted_thinking":
                pass  # chat templates drop earlier thoughts too
            case other:
                raise ApiError(
                    400, f"Content of type {other!r} can't be served here.", code="unsupported_content"
                )
    if parts or calls:
        said: dict[str, Any] = {"role": message.role, "content": _joined(parts)}
        if calls:
            said["tool_calls"] = calls
        out.append(said)
    return out


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]] | None:
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts) or None
    return parts


def _image_url(block: _Block) -> str:
    source = block.source or {}
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/png')};base64,{source.get('data', '')}"
