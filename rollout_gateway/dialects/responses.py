"""OpenAI's `/v1/responses` as chat completions.

Nothing is stored for `previous_response_id` and `GET /v1/responses/<id>`. The id of a response holds the id of its
chat completion, and the log holds the chat completions of a trajectory. So both work for calls that name their
trajectory, on any replica, for as long as the log keeps the calls. `store` in a response says whether that is so. It
is false if the client asked for that."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.dialects.calls import Call
from rollout_gateway.dialects.responses_input import (
    ResponsesRequest,
    ToolName,
    Tools,
    add_message,
    client_tools,
    response_format,
)
from rollout_gateway.dialects.responses_output import ResponseWriter
from rollout_gateway.dialects.translate import chat_call, chat_request, sampling_fields
from rollout_gateway.http.body import read_body
from rollout_gateway.http.errors import ApiError

_WITH_INSTRUCTIONS, _WITHOUT_INSTRUCTIONS = "resp_i", "resp_n"
"""Prefixes of ids. With the first, the chat completion's first message holds the call's `instructions`."""
TOOL_NAMES = "journeyman_tools"
"""Field of the recorded request's `metadata`: `Tools.renamed()`, from which `GET` makes the response again."""


class ResponsesTranslation:
    """One call of `/v1/responses`. Raises a 400 `ApiError` for an invalid body."""

    path: ClassVar[str] = "/v1/responses"

    def __init__(self, body: bytes) -> None:
        self.request = read_body(body, ResponsesRequest)
        self._sampling = sampling_fields(body)
        if self.request.background:
            raise ApiError(400, "background is not supported.", code="unsupported", param="background")
        self._tools = Tools.of(self.request.tools or [])
        prefix = _WITH_INSTRUCTIONS if self.request.instructions else _WITHOUT_INSTRUCTIONS
        self._writer = ResponseWriter(self.request, prefix, self._tools.names)
        self.answer = self._writer.answer
        self.take = self._writer.take
        self.end = self._writer.end
        self.stream_error = self._writer.stream_error

    @property
    def stored(self) -> bool:
        """Whether the log keeps the response."""
        return self._writer.stored

    @stored.setter
    def stored(self, stored: bool) -> None:
        self._writer.stored = stored

    @property
    def left_out(self) -> list[str]:
        """Types of the request's tools that the model was not shown."""
        return self._tools.left_out

    @property
    def previous(self) -> str:
        """Id of the chat completion that the call continues. Empty if there is none. Raises a 400 `ApiError` for an
        invalid id."""
        name = self.request.previous_response_id
        completion = completion_of(name) if name else ""
        if name and not completion:
            raise previous_not_found(name)
        return completion

    def chat(self, before: ExchangeRecorded | None = None) -> dict[str, Any]:
        """Return the chat completion request. `before` is the exchange that `previous` names."""
        request = self.request
        messages: list[dict[str, Any]] = []
        if request.instructions:
            messages.append({"role": "system", "content": request.instructions})
        if before is not None:
            # OpenAI does not carry instructions over either.
            instructed = str(request.previous_response_id).startswith(_WITH_INSTRUCTIONS)
            messages += _conversation(before)[1 if instructed else 0 :]
        if isinstance(request.input, str):
            messages.append({"role": "user", "content": request.input})
        else:
            for item in request.input:
                add_message(messages, item)
        chat = chat_request(request, messages, self._sampling)
        if request.max_output_tokens is not None:
            chat["max_tokens"] = request.max_output_tokens
        if self._tools.chat:
            chat["tools"] = self._tools.chat
        if request.tools and request.tool_choice is not None:
            choice = self._tools.choice(request.tool_choice)
            if choice is not None:
                chat["tool_choice"] = choice
        if (form := response_format(request.text)) is not None:
            chat["response_format"] = form
        return chat

    def call(self, before: ExchangeRecorded | None = None) -> Call:
        """Return the call for the inference server, as `chat` has it."""
        names = self._tools.renamed()
        return chat_call(self.chat(before), self.path, {TOOL_NAMES: names} if names else None)

    @staticmethod
    def error(body: bytes, status: int) -> bytes:
        return body  # both APIs have OpenAI's format

    @classmethod
    def recorded(cls, name: str, exchange: ExchangeRecorded) -> dict[str, Any]:
        """Return the response with the id `name` again, from its exchange."""
        chat = msgspec.json.decode(exchange.request)
        choice = chat.get("tool_choice")
        if isinstance(choice, dict):
            choice = {"type": "function", **choice["function"]}
        names = msgspec.convert((chat.get("metadata") or {}).get(TOOL_NAMES, {}), dict[str, ToolName])
        request = {
            "model": chat["model"],
            "input": "",
            "instructions": chat["messages"][0]["content"] if name.startswith(_WITH_INSTRUCTIONS) else None,
            "tools": client_tools(chat.get("tools") or [], names),
            "tool_choice": choice,
            "max_output_tokens": chat.get("max_tokens"),
            **{key: chat.get(key) for key in ("parallel_tool_calls", "temperature", "top_p")},
        }
        translation = cls(msgspec.json.encode(request))
        translation.stored = True
        return {**translation.answer(msgspec.json.decode(exchange.response)), "id": name}


def completion_of(response: str) -> str:
    """Return the id of the chat completion that a response was. Empty if `response` is not a response's id."""
    prefix, _, completion = response.partition("-")
    return completion if prefix in (_WITH_INSTRUCTIONS, _WITHOUT_INSTRUCTIONS) else ""


def previous_not_found(name: str) -> ApiError:
    return ApiError(
        400,
        f"The log holds no response {name!r} of this trajectory: send the whole input without previous_response_id.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


def _conversation(exchange: ExchangeRecorded) -> list[dict[str, Any]]:
    """Return the messages of an exchange with its answer, as a client would send them."""
    messages: list[dict[str, Any]] = msgspec.json.decode(exchange.request)["messages"]
    (choice,) = msgspec.json.decode(exchange.response)["choices"]
    message = choice["message"]
    answer: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if message.get("tool_calls"):
        answer["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": call["function"]}
            for call in message["tool_calls"]
        ]
    return [*messages, answer]
