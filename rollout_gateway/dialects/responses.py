"""OpenAI's `/v1/responses`, as chat completions and back.

Nothing is kept for `previous_response_id` and `GET /v1/responses/<id>`: a response's id holds that of the chat completion it
was, and a trajectory's completions are on the log. So both work for calls that name their trajectory, on any replica, for as
long as the log goes back. `store` says whether that is so, unless the client asked for false.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any, ClassVar

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.dialects.responses_input import (
    CUSTOM_INPUT,
    ResponsesRequest,
    ToolName,
    Tools,
    add_message,
)
from rollout_gateway.dialects.translate import passed, read, sse
from rollout_gateway.http.errors import ApiError

_INSTRUCTED, _BARE = "resp_i", "resp_n"
"""How ids begin; the first where the first message was the call's `instructions`."""
_KINDS = (_INSTRUCTED, _BARE)
TOOL_NAMES = "journeyman_tools"
"""Field of the recorded request's `metadata`: what `ResponsesTranslation.names` was, so that a response can be made again."""


class ResponsesTranslation:
    """One call of `/v1/responses`."""

    path: ClassVar[str] = "/v1/responses"

    def __init__(self, body: bytes) -> None:
        self.request = read(body, ResponsesRequest)
        self._passed = passed(body)
        if self.request.background:
            raise ApiError(400, "background is not supported.", code="unsupported", param="background")
        self.stored = False
        """Whether the log keeps the response."""
        self._tools = Tools.of(self.request.tools or [])
        self.id = ""
        """Known once the chat completion's is."""
        self._created = int(time.time())
        self._number = 0
        self._items: list[dict[str, Any]] = []
        """Output items of a stream, the last of which is being written while `_writing`."""
        self._writing = ""
        self._tool = -1
        self._arguments = ""
        """Of the tool call that is being written."""
        self._model = self.request.model
        self._finish = "stop"
        self._usage: dict[str, Any] | None = None

    @classmethod
    def recorded(cls, name: str, exchange: ExchangeRecorded) -> dict[str, Any]:
        """The response of that id, from its exchange."""
        chat = msgspec.json.decode(exchange.request)
        system = chat["messages"][:1] if name.startswith(_INSTRUCTED) else []
        choice = chat.get("tool_choice")
        if isinstance(choice, dict):
            choice = {"type": "function", **choice["function"]}
        names = msgspec.convert((chat.get("metadata") or {}).get(TOOL_NAMES, {}), dict[str, ToolName])
        tools = Tools.sent(chat.get("tools") or [], names)
        asked = {
            "model": chat["model"], "input": "", "instructions": system[0]["content"] if system else None,
            "tools": tools, "tool_choice": choice, "parallel_tool_calls": chat.get("parallel_tool_calls"),
            "max_output_tokens": chat.get("max_tokens"), "temperature": chat.get("temperature"),
            "top_p": chat.get("top_p"),
        }  # fmt: skip
        translation = cls(msgspec.json.encode(asked))
        translation.stored = True
        answer = translation.answer(msgspec.json.decode(exchange.response))
        return {**answer, "id": name}

    @property
    def previous(self) -> str:
        """Id of the chat completion that the call goes on from, or nothing. Raises a 400 `ApiError` on what is no id."""
        asked = self.request.previous_response_id
        if not asked:
            return ""
        completion = completion_of(asked)
        if not completion:
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
                add_message(messages, item)
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
        if self._tools.chat:
            out["tools"] = self._tools.chat
        if asked.tools and asked.tool_choice is not None:
            choice = self._tools.choice(asked.tool_choice)
            if choice is not None:
                out["tool_choice"] = choice
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
        items: list[dict[str, Any]] = []
        if message.get("reasoning"):
            items.append(_reasoning_item(self._item_id("rs", 0), message["reasoning"]))
        if message.get("content"):
            items.append(_message_item(self._item_id("msg", len(items)), message["content"]))
        for call in message.get("tool_calls") or ():
            function = call["function"]
            item = self._call_item(len(items), call["id"], function["name"])
            _write_arguments(item, function["arguments"])
            items.append(item)
        self._model = completion.get("model", self._model)
        return self._response(items, choice.get("finish_reason") or "stop", completion.get("usage"))

    @property
    def names(self) -> dict[str, ToolName]:
        """What the client calls the tools that the model knows by another name, or as functions though they are none."""
        return {flat: tool for flat, tool in self._tools.names.items() if tool != ToolName(flat)}

    @property
    def left_out(self) -> list[str]:
        """Types of the request's tools that the model was not shown."""
        return self._tools.left_out

    def _item_id(self, prefix: str, position: int) -> str:
        """Always the same for a response, so that it can be read again."""
        return f"{prefix}_{hashlib.sha256(f'{self.id} {position}'.encode()).hexdigest()[:24]}"

    def _call_item(self, position: int, call_id: str, flat: str) -> dict[str, Any]:
        tool = self._tools.names.get(flat) or ToolName(flat)
        if tool.custom:
            return {
                "type": "custom_tool_call", "id": self._item_id("ctc", position), "call_id": call_id, "name": tool.name,
                "input": "", "status": "completed", **({"namespace": tool.namespace} if tool.namespace else {}),
            }  # fmt: skip
        return {
            "type": "function_call", "id": self._item_id("fc", position), "call_id": call_id, "name": tool.name,
            "arguments": "", "status": "completed", **({"namespace": tool.namespace} if tool.namespace else {}),
        }  # fmt: skip

    def _response(
        self, items: list[dict[str, Any]], finish: str, usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        asked = self.request
        cut = finish == "length"
        if cut and items and "status" in items[-1]:
            items[-1]["status"] = "incomplete"
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
            "tools": msgspec.to_builtins(asked.tools or []),
            "previous_response_id": asked.previous_response_id,
            "store": self.stored and asked.store is not False,
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
        self._created = completion.get("created") or self._created

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
            if delta.get("reasoning"):
                out += self._reasoning_delta(delta["reasoning"])
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
            item = _message_item(self._item_id("msg", len(self._items)), "")
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

    def _reasoning_delta(self, text: str) -> bytes:
        out = b""
        if self._writing != "reasoning":
            out += self._close()
            self._writing = "reasoning"
            item = _reasoning_item(self._item_id("rs", len(self._items)), "")
            self._items.append(item)
            out += self._event(
                "response.output_item.added", output_index=self._at, item={**item, "summary": []}
            )
            out += self._event(
                "response.reasoning_summary_part.added", item_id=item["id"], output_index=self._at, summary_index=0,
                part=_summary_part(""),
            )  # fmt: skip
        item = self._items[-1]
        item["summary"][0]["text"] += text
        return out + self._event(
            "response.reasoning_summary_text.delta", item_id=item["id"], output_index=self._at, summary_index=0,
            delta=text,
        )  # fmt: skip

    def _tool_delta(self, call: dict[str, Any]) -> bytes:
        function = call.get("function") or {}
        out = b""
        if call["index"] != self._tool:
            self._tool = call["index"]
            out += self._close()
            item = self._call_item(len(self._items), call.get("id", ""), function.get("name", ""))
            self._writing, self._arguments = item["type"], ""
            self._items.append(item)
            shown = {**item, "status": "in_progress"}
            out += self._event("response.output_item.added", output_index=self._at, item=shown)
        item = self._items[-1]
        if arguments := function.get("arguments"):
            self._arguments += arguments
            if self._writing == "function_call":  # a custom tool's text is told when it is whole
                out += self._event(
                    "response.function_call_arguments.delta", item_id=item["id"], output_index=self._at, delta=arguments
                )  # fmt: skip
        return out

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _close(self, *, cut: bool = False) -> bytes:
        """Finish the item that is being written; `cut`: as far as it came, so that nothing says that it is done."""
        if not self._writing:
            return b""
        item = self._items[-1]
        here = {"item_id": item["id"], "output_index": self._at}
        out = b""
        if self._writing == "reasoning":
            part = item["summary"][0]
            out += self._event(
                "response.reasoning_summary_text.done", **here, summary_index=0, text=part["text"]
            )
            out += self._event("response.reasoning_summary_part.done", **here, summary_index=0, part=part)
        elif self._writing == "message":
            text = item["content"][0]["text"]
            out += self._event("response.output_text.done", **here, content_index=0, text=text, logprobs=[])
            out += self._event("response.content_part.done", **here, content_index=0, part=item["content"][0])
        else:
            _write_arguments(item, self._arguments)
            if self._writing == "custom_tool_call":
                text = item["input"]
                if text:
                    out += self._event("response.custom_tool_call_input.delta", **here, delta=text)
                if not cut:
                    out += self._event("response.custom_tool_call_input.done", **here, input=text)
            elif not cut:
                out += self._event(
                    "response.function_call_arguments.done",
                    **here,
                    arguments=item["arguments"],
                    name=item["name"],
                )
        if cut and "status" in item:
            item["status"] = "incomplete"
        self._writing = ""
        return out + self._event("response.output_item.done", output_index=self._at, item=item)

    def end(self) -> bytes:
        out = self._begun() + self._close(cut=self._finish == "length")
        response = self._response(self._items, self._finish, self._usage)
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        return out + self._event(kind, response=response)

    def error(self, body: bytes, status: int) -> bytes:
        return body

    def stream_error(self, error: dict[str, Any]) -> bytes:
        if self._writing and "arguments" in self._items[-1]:
            self._items[-1]["arguments"] = self._arguments
        if self._writing and "status" in self._items[-1]:
            self._items[-1]["status"] = "incomplete"
        response = {
            **self._response(self._items, "stop", None), "status": "failed",
            "error": {"code": "server_error", "message": error.get("message")},
        }  # fmt: skip
        return self._begun() + self._event("response.failed", response=response)


def completion_of(response: str) -> str:
    """Id of the chat completion that a response was; empty for what is no response's id."""
    kind, _, completion = response.partition("-")
    return completion if kind in _KINDS else ""


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


def _summary_part(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _reasoning_item(name: str, text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": name, "summary": [_summary_part(text)]}


def _write_arguments(item: dict[str, Any], arguments: str) -> None:
    """What the model wrote as a call's arguments: as it is, or the text in it where the tool is a custom one."""
    if item["type"] == "function_call":
        item["arguments"] = arguments
        return
    try:
        written = msgspec.json.decode(arguments or "null")
    except msgspec.DecodeError:
        written = None
    item["input"] = (
        str(written[CUSTOM_INPUT]) if isinstance(written, dict) and CUSTOM_INPUT in written else arguments
    )


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _message_item(name: str, text: str) -> dict[str, Any]:
    return {
        "type": "message", "id": name, "role": "assistant", "status": "completed", "content": [_text_part(text)]
    }  # fmt: skip


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }
