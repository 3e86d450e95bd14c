"""OpenAI's `/v1/responses`, as chat completions and back.

Nothing is kept for `previous_response_id`: a response's id holds that of the chat completion it was, and a trajectory's
completions are on the log. So it works for calls that name their trajectory, on any replica, for as long as the log goes
back; `store` makes no difference.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.errors import ApiError
from rollout_gateway.translate import passed, read, sse

_INSTRUCTED, _BARE = "resp_i", "resp_n"
"""How ids begin; the first where the first message was the call's `instructions`."""
_KINDS = (_INSTRUCTED, _BARE)


class _Part(msgspec.Struct):
    type: str
    text: str = ""
    refusal: str = ""
    image_url: str | None = None


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: str | list[_Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[_Part] = ""


class _Tool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _TextSetting(msgspec.Struct):
    format: dict[str, Any] | None = None


class _Request(msgspec.Struct):
    model: str
    input: str | list[_Item]
    instructions: str | None = None
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: _TextSetting | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None


class ResponsesTranslation:
    """One call of `/v1/responses`."""

    path = "/v1/responses"

    def __init__(self, body: bytes) -> None:
        self.request = read(body, _Request)
        self._passed = passed(body)
        if self.request.background:
            raise ApiError(400, "background is not supported.", code="unsupported", param="background")
        self.id = ""
        """Known once the chat completion's is."""
        self._created = int(time.time())
        self._number = 0
        self._items: list[dict[str, Any]] = []
        """Output items of a stream, the last of which is being written while `_writing`."""
        self._writing = ""
        self._tool = -1
        self._model = self.request.model
        self._finish = "stop"
        self._usage: dict[str, Any] | None = None

    @property
    def previous(self) -> str:
        """Id of the chat completion that the call goes on from, or nothing. Raises a 400 `ApiError` on what is no id."""
        asked = self.request.previous_response_id
        if not asked:
            return ""
        kind, _, completion = asked.partition("-")
        if kind not in _KINDS or not completion:
            raise previous_not_found(asked)
        return completion

    def chat(self, before: ExchangeRecorded | None = None) -> dict[str, Any]:
        """The request; `before` is the exchange that `previous` names."""
        asked = self.request
        messages: list[dict[str, Any]] = []
        if asked.instructions:
            messages.append({"role": "system", "content": asked.instructions})
        if before is not None:
            # As OpenAI has it, instructions are not carried over.
            instructed = str(asked.previous_response_id).startswith(_INSTRUCTED)
            messages += _said_before(before)[1 if instructed else 0 :]
        if isinstance(asked.input, str):
            messages.append({"role": "user", "content": asked.input})
        else:
            for item in asked.input:
                _add_message(messages, item)
        out: dict[str, Any] = {
            "model": asked.model,
            "messages": messages,
            "stream": bool(asked.stream),
            **self._passed,
        }
        if asked.stream:
            out["stream_options"] = {"include_usage": True}
        for name in ("temperature", "top_p", "parallel_tool_calls"):
            if (value := getattr(asked, name)) is not None:
                out[name] = value
        if asked.max_output_tokens is not None:
            out["max_tokens"] = asked.max_output_tokens
        if asked.tools:
            out["tools"] = [_chat_tool(tool) for tool in asked.tools]
            if isinstance(asked.tool_choice, dict):
                name = asked.tool_choice.get("name", "")
                out["tool_choice"] = {"type": "function", "function": {"name": name}}
            elif asked.tool_choice is not None:
                out["tool_choice"] = asked.tool_choice
        if asked.text is not None and asked.text.format is not None:
            form = dict(asked.text.format)
            kind = form.pop("type", "text")
            out["response_format"] = (
                {"type": kind, "json_schema": form} if kind == "json_schema" else {"type": kind}
            )
        return out

    def answer(self, completion: dict[str, Any]) -> dict[str, Any]:
        self._name(completion)
        choice = completion["choices"][0]
        message = choice["message"]
        items = []
        if message.get("reasoning"):
            items.append({"type": "reasoning", "id": _id("rs"), "summary": [
                {"type": "summary_text", "text": message["reasoning"]}
            ]})  # fmt: skip
        if message.get("content"):
            items.append(_message_item(_id("msg"), message["content"]))
        items += [
            _call_item(_id("fc"), call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        self._model = completion.get("model", self._model)
        return self._response(items, choice.get("finish_reason") or "stop", completion.get("usage"))

    def _response(
        self, items: list[dict[str, Any]], finish: str, usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        asked = self.request
        cut = finish == "length"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": self._model,
            "output": items,
            "instructions": asked.instructions,
            "metadata": asked.metadata or {},
            "max_output_tokens": asked.max_output_tokens,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": asked.tool_choice or "auto",
            "tools": [msgspec.to_builtins(tool) for tool in asked.tools or ()],
            "previous_response_id": asked.previous_response_id,
            "store": True,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "usage": _usage(usage) if usage else None,
        }

    # -- streaming

    def _event(self, kind: str, **data: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **data}
        self._number += 1
        return sse(kind, event)

    def _name(self, completion: dict[str, Any]) -> None:
        self.id = f"{_INSTRUCTED if self.request.instructions else _BARE}-{completion.get('id', '')}"

    def begin(self) -> bytes:
        return b""  # the first event holds an id, which the first chunk brings

    def _begun(self) -> bytes:
        """The first events, unless they have been."""
        if self._number:
            return b""
        response = {**self._response([], "stop", None), "status": "in_progress"}
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def take(self, chunk: dict[str, Any]) -> bytes:
        if not self.id:
            self._name(chunk)
        out = self._begun()
        self._model = chunk.get("model", self._model)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            delta = choice.get("delta") or {}
            if delta.get("content"):
                out += self._text_delta(delta["content"])
            for call in delta.get("tool_calls") or ():
                out += self._tool_delta(call)
            self._finish = choice.get("finish_reason") or self._finish
        return out

    def _text_delta(self, text: str) -> bytes:
        out = b""
        if self._writing != "message":
            out += self._close()
            self._writing = "message"
            item = _message_item(_id("msg"), "")
            self._items.append(item)
            shown = {**item, "status": "in_progress", "content": []}
            out += self._event("response.output_item.added", output_index=self._at, item=shown)
            out += self._event(
                "response.content_part.added", item_id=item["id"], output_index=self._at, content_index=0,
                part=_text_part(""),
            )  # fmt: skip
        item = self._items[-1]
        item["content"][0]["text"] += text
        return out + self._event(
            "response.output_text.delta", item_id=item["id"], output_index=self._at, content_index=0, delta=text,
            logprobs=[],
        )  # fmt: skip

    def _tool_delta(self, call: dict[str, Any]) -> bytes:
        function = call.get("function") or {}
        out = b""
        if call["index"] != self._tool:
            self._tool = call["index"]
            out += self._close()
            self._writing = "function_call"
            item = _call_item(_id("fc"), call.get("id", ""), function.get("name", ""), "")
            self._items.append(item)
            shown = {**item, "status": "in_progress"}
            out += self._event("response.output_item.added", output_index=self._at, item=shown)
        item = self._items[-1]
        if arguments := function.get("arguments"):
            item["arguments"] += arguments
            out += self._event(
                "response.function_call_arguments.delta", item_id=item["id"], output_index=self._at, delta=arguments
            )  # fmt: skip
        return out

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _close(self) -> bytes:
        """Finish the item that is being written."""
        if not self._writing:
            return b""
        item = self._items[-1]
        here = {"item_id": item["id"], "output_index": self._at}
        if self._writing == "message":
            text = item["content"][0]["text"]
            out = self._event("response.output_text.done", **here, content_index=0, text=text, logprobs=[])
            out += self._event("response.content_part.done", **here, content_index=0, part=item["content"][0])
        else:
            out = self._event(
                "response.function_call_arguments.done",
                **here,
                arguments=item["arguments"],
                name=item["name"],
            )
        self._writing = ""
        return out + self._event("response.output_item.done", output_index=self._at, item=item)

    def end(self) -> bytes:
        out = self._begun() + self._close()
        response = self._response(self._items, self._finish, self._usage)
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        return out + self._event(kind, response=response)

    def error(self, body: bytes) -> bytes:
        return body

    def stream_error(self, error: dict[str, Any]) -> bytes:
        response = {
            **self._response(self._items, "stop", None), "status": "failed",
            "error": {"code": "server_error", "message": error.get("message")},
        }  # fmt: skip
        return self._begun() + self._event("response.failed", response=response)


def previous_not_found(name: str) -> ApiError:
    return ApiError(
        400,
        f"Previous response {name!r} is not of this trajectory, or the log no longer holds it: send the whole input.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


def _said_before(exchange: ExchangeRecorded) -> list[dict[str, Any]]:
    """The messages of an exchange, its answer last, as a client would send them back."""
    messages: list[dict[str, Any]] = msgspec.json.decode(exchange.request)["messages"]
    (choice,) = msgspec.json.decode(exchange.response)["choices"]
    said = choice["message"]
    answer: dict[str, Any] = {"role": "assistant", "content": said.get("content")}
    if said.get("tool_calls"):
        answer["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": call["function"]}
            for call in said["tool_calls"]
        ]
    return [*messages, answer]


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(name: str, text: str) -> dict[str, Any]:
    return {
        "type": "message", "id": name, "role": "assistant", "status": "completed", "content": [_text_part(text)]
    }  # fmt: skip


def _call_item(name: str, call_id: str, function: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "function_call", "id": name, "call_id": call_id, "name": function, "arguments": arguments,
        "status": "completed",
    }  # fmt: skip


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _chat_tool(tool: _Tool) -> dict[str, Any]:
    if tool.type != "function":
        raise ApiError(
            400, f"Tools of type {tool.type!r} can't be served here.", code="unsupported_tool", param="tools"
        )
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.parameters or {"type": "object"}}
    if tool.description:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _add_message(messages: list[dict[str, Any]], item: _Item) -> None:
    match item.type:
        case "message":
            role = "system" if item.role == "developer" else item.role or "user"
            messages.append({"role": role, "content": _content(item.content)})
        case "function_call":
            call = {
                "id": item.call_id, "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }  # fmt: skip
            # Calls of one turn, and the text before them, are one message of chat's.
            if messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        case "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
        case "reasoning":
            pass  # chat templates drop earlier thoughts too
        case other:
            raise ApiError(
                400,
                f"Input of type {other!r} can't be served here.",
                code="unsupported_content",
                param="input",
            )


def _content(content: str | list[_Part] | None) -> str | list[dict[str, Any]]:
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
