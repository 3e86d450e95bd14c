"""OpenAI's `/v1/responses` as chat completions.

Nothing is stored for `previous_response_id` and `GET /v1/responses/<id>`. The id of a response holds the id of its
chat completion, and the log holds the chat completions of a trajectory. So both work for calls that name their
trajectory, on any replica, for as long as the log keeps the calls. `store` in a response says whether that is so. It
is false if the client asked for that."""

from __future__ import annotations

from typing import Any

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.dialects.responses_input import (
    ToolName,
    Tools,
    add_message,
    client_tools,
    response_format,
)
from rollout_gateway.dialects.responses_output import ResponseWriter
from rollout_gateway.http.errors import ApiError

_WITH_INSTRUCTIONS, _WITHOUT_INSTRUCTIONS = "resp_i", "resp_n"
"""Prefixes of ids. With the first, the chat completion's first message holds the call's `instructions`."""
TOOL_NAMES = "journeywork_tools"
"""Field of the recorded request's `metadata`: `Tools.renamed()`, from which `GET` makes the response again."""


class ResponsesTranslation(ResponseWriter):
    """One call of `/v1/responses`."""

    path = "/v1/responses"

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        request = self.request
        if request.background:
            raise ApiError(400, "unsupported", "background is not supported.", param="background")
        self._tools = Tools.of(request.tools or [])
        self.names, self.left_out = self._tools.names, self._tools.left_out
        renamed = self._tools.renamed()
        self.metadata = {TOOL_NAMES: renamed} if renamed else None
        self.prefix = _WITH_INSTRUCTIONS if request.instructions else _WITHOUT_INSTRUCTIONS
        name = request.previous_response_id
        self.previous = completion_of(name) if name else ""
        if name and not self.previous:
            raise previous_not_found(name)

    def chat(self, before: ExchangeRecorded | None = None) -> dict[str, Any]:
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
        chat = self._chat(messages, request.max_output_tokens)
        if self._tools.chat:
            chat["tools"] = self._tools.chat
        if request.tools and request.tool_choice is not None:
            choice = self._tools.choice(request.tool_choice)
            if choice is not None:
                chat["tool_choice"] = choice
        if (form := response_format(request.text)) is not None:
            chat["response_format"] = form
        return chat

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
        "previous_response_not_found",
        f"The log holds no response {name!r} of this trajectory: send the whole input without previous_response_id.",
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
