"""Translates Anthropic's `/v1/messages` to chat completions and back. `messages_input` reads the request;
`rollout_gateway.dialects.translate` says how a translation is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.dialects.messages_input import MessagesRequest, ToolChoice, chat_messages, system_text, tools_of
from rollout_gateway.dialects.translate import Translation, parse_object

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _BlockFormat(NamedTuple):
    """How Anthropic's API writes a content block."""

    type: str
    empty: dict[str, Any]
    """Fields of a block without content."""
    delta_type: str
    """Type of a streamed piece of the block."""
    delta_field: str
    """Field of such a piece that holds its text."""


_BLOCK_FORMATS = {
    "reasoning": _BlockFormat("thinking", {"thinking": "", "signature": ""}, "thinking_delta", "thinking"),
    "content": _BlockFormat("text", {"text": ""}, "text_delta", "text"),
    "tool": _BlockFormat("tool_use", {"input": {}}, "input_json_delta", "partial_json"),
}
"""The format of a block by its kind (`Translation.begin_block`)."""
_FORMATS_BY_TYPE = {form.type: form for form in _BLOCK_FORMATS.values()}

_ABOUT_CALLER = ("billing_policy", "diagnostics", "fallback_credit_token", "user_profile_id", "workspace_id")
_OF_ANTHROPICS_MODELS = ("cache_control", "context_management", "inference_geo", "speed", "thinking")
_ERROR_BYTES = 500
"""Bytes of an answer in an unknown format that become the message of the error."""


class _OpenAiError(msgspec.Struct):
    error: dict[str, Any]


class MessagesTranslation(Translation):
    """One call of `/v1/messages`."""

    path = "/v1/messages"
    kind = MessagesRequest
    dropped = frozenset((*_ABOUT_CALLER, *_OF_ANTHROPICS_MODELS))
    request: MessagesRequest
    _system_first = False
    """Whether later system messages are put into the first one, since the server refused the call as it was
    (`merge_system`)."""

    def merge_system(self) -> bool:
        """Have the next `call` put later system messages into the first one. Returns whether that changes the call."""
        changes = not self._system_first and any(m.role == "system" for m in self.request.messages)
        self._system_first = True
        return changes

    def chat(self, exchanges: Mapping[str, ExchangeRecorded] | None = None) -> dict[str, Any]:
        """Return the chat completion request. No call of this API refers to recorded ones, so `exchanges` is not
        read."""
        request = self.request
        messages: list[dict[str, Any]] = []
        system = [system_text(request.system)]
        tools, removed = tools_of(request)
        for message in request.messages:
            if message.role != "system":
                messages += chat_messages(message, tools)
            elif self._system_first:
                system.append(system_text(message.content))
            elif text := system_text(message.content):
                messages.append({"role": "system", "content": text})
        if text := "\n".join(filter(None, system)):
            messages.insert(0, {"role": "system", "content": text})
        chat = self._chat(messages, request.max_tokens)
        if request.stop_sequences:
            chat["stop"] = request.stop_sequences
        if request.output_config and (form := request.output_config.format) and form.schema:
            json_schema = {"name": "output", "schema": form.schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": json_schema}
        if shown := [t.as_chat_tool() for t in tools.values() if not t.defer_loading and t.name not in removed]:
            chat["tools"] = shown
            choice = request.tool_choice or ToolChoice()
            chat["tool_choice"] = {
                "auto": "auto",
                "any": "required",
                "none": "none",
                "tool": {"type": "function", "function": {"name": choice.name}},
            }[choice.type]
            if choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
        return chat

    def whole_answer(self) -> dict[str, Any]:
        """Return the whole message."""
        return {
            "id": "msg_" + self.id.partition("-")[2],
            "type": "message",
            "role": "assistant",
            "model": self.head.get("model", self.request.model),
            "content": self.blocks,
            **self._stop_fields(),
            "usage": _usage(self.usage),
        }

    def first_events(self) -> bytes:
        """Return the event that begins a stream."""
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(None)}
        return self.event("message_start", message=self.whole_answer() | empty)

    def begin_block(self, kind: str, call_id: str, name: str) -> bytes:
        """Add an empty content block. Returns its first event."""
        form = _BLOCK_FORMATS[kind]
        tool = {"id": call_id, "name": name} if kind == "tool" else {}
        block = {"type": form.type, **tool, **form.empty}
        self.blocks.append(block)
        if not self.streams:
            return b""
        return self.event("content_block_start", index=len(self.blocks) - 1, content_block=block)

    def text_delta(self, place: int, text: str) -> bytes:
        """Return the event for a further piece of a block's text; of a tool call, of its arguments as JSON."""
        form = _FORMATS_BY_TYPE[self.blocks[place]["type"]]
        piece = {"type": form.delta_type, form.delta_field: text}
        return self.event("content_block_delta", index=place, delta=piece)

    def end_block(self, place: int) -> bytes:
        """Put the collected text into a block. Returns its last event."""
        block, text = self.blocks[place], self.text(place)
        match block["type"]:
            case "tool_use":
                # `messages_input` gives the model its own text again when the client sends the call back.
                arguments = parse_object(text)
                block["input"] = {"_raw": text} if arguments is None else arguments
            case kind:
                block[kind] = text
        return self.event("content_block_stop", index=place) if self.streams else b""

    def last_events(self) -> bytes:
        """Return the events that end a stream: those of open blocks, and why the model stopped."""
        out = self.close_blocks()
        out += self.event("message_delta", delta=self._stop_fields(), usage=_usage(self.usage))
        return out + self.event("message_stop")

    def stream_error(self, error: dict[str, Any]) -> bytes:
        """Return the event for an error in the middle of a stream."""
        status = 503 if error.get("code") == "stopping" else 500
        return self.event("error", error=_error(error, status)["error"])

    def _stop_fields(self) -> dict[str, str | None]:
        """Return the fields that tell why the model stopped."""
        sequence, reason = self.ended.get("stop_reason"), self.ended.get("finish_reason") or "stop"
        if isinstance(sequence, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
        called = reason == "stop" and any(block["type"] == "tool_use" for block in self.blocks)
        reason = "tool_use" if called else _STOP_REASONS.get(reason, "end_turn")
        return {"stop_reason": reason, "stop_sequence": None}


def error_body(path: str, body: bytes, status: int) -> bytes:
    """Convert an error from OpenAI's format to that of the API which has this path.

    If the body is not in OpenAI's format, for example the text of a proxy, its beginning becomes the message in
    Anthropic's."""
    if path != MessagesTranslation.path and not path.startswith(MessagesTranslation.path + "/"):
        return body
    try:
        error = msgspec.json.decode(body, type=_OpenAiError).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = {"message": body[:_ERROR_BYTES].decode(errors="replace")}
    return msgspec.json.encode(_error(error, status))


def _error(error: dict[str, Any], status: int) -> dict[str, Any]:
    """Return Anthropic's form of the OpenAI error `error`; its type follows from the status."""
    kind = _ERRORS.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.get("message")}}


def _usage(usage: dict[str, Any] | None) -> dict[str, int]:
    """Convert a chat completion's usage."""
    usage = usage or {}
    return {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens") or 0}
