"""Translates OpenAI's `/v1/responses` to chat completions and back. `responses_input` reads the request;
`rollout_gateway.dialects.translate` says how a translation is used.

An answer is a response whose `output` is a list of items: reasoning, a message, calls of functions and of custom tools.
The blocks of the base class are these items. Clients may refer to a recorded response (`previous_response_id`) or to
one of its items (`item_reference`) instead of sending it back."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.events import ExchangeRecorded
from rollout_gateway.dialects.responses_input import (
    CUSTOM_INPUT,
    ResponsesRequest,
    ToolName,
    Tools,
    add_call,
    add_item,
    add_reasoning,
    add_text,
    encode_reasoning,
    response_format,
)
from rollout_gateway.dialects.translate import Translation, parse_object
from rollout_gateway.http.errors import ApiError

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}
"""How the ids of output items begin."""
_KIND_OF_PREFIX = {prefix: kind for kind, prefix in _PREFIXES.items()}
_ITEM_ID = re.compile(r"(rs|msg|fc|ctc)_(\d{1,4})-(.+)")
"""Kind of an output item, its number among the response's items of its kind (calls of functions and of custom tools
count as one kind), and the chat completion's id."""
_RESPONSE_ID = re.compile(r"resp_([in])-(.+)")
"""Whether the recorded request begins with the call's `instructions` (i) or has none (n), and the chat completion's
id."""
_INCLUDE_ENCODED = "reasoning.encrypted_content"
_ABOUT_CALLER = ("client_metadata", "prompt_cache_options", "stream_options")
_OF_OPENAIS_MODELS = ("context_management", "max_tool_calls", "reasoning", "truncation")
_PARTS = {
    "reasoning": ("summary", "response.reasoning_summary_part", "response.reasoning_summary_text"),
    "message": ("content", "response.content_part", "response.output_text"),
}
"""Of items with text: the field of their only part, and how the events about the part and its text begin."""


class ResponsesTranslation(Translation):
    """One call of `/v1/responses`.

    Nothing is stored for `previous_response_id` and items of type `item_reference`. Their ids hold the id of a chat
    completion, which names its trajectory, and the log holds the chat completions of trajectories. So both work on any
    gateway, for as long as the log keeps the calls."""

    path = "/v1/responses"
    kind = ResponsesRequest
    dropped = frozenset((*_ABOUT_CALLER, *_OF_OPENAIS_MODELS))
    request: ResponsesRequest

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        if self.request.background:
            raise ApiError(400, "unsupported", "background is not supported.", param="background")
        self.instructions = self.request.instructions
        self._tools = Tools(self.request.tools or ())
        self.left_out = self._tools.left_out
        self._prefix = "resp_i-" if self.request.instructions else "resp_n-"
        self.referenced_ids = self._find_referenced_ids()
        self._created = int(time.time())
        self._event_number = 0
        """Sequence number of the next event."""

    def _find_referenced_ids(self) -> frozenset[str]:
        """Return the ids of the chat completions that `previous_response_id` and references to items name. Raises a 400
        `ApiError` for an id that is of neither form."""
        named = []
        if previous := self.request.previous_response_id:
            named.append(_match_id(_RESPONSE_ID, previous))
        if not isinstance(self.request.input, str):
            named += [_match_id(_ITEM_ID, i.id or "") for i in self.request.input if i.type == "item_reference"]
        # The last group of either pattern is the chat completion's id.
        return frozenset(match[match.re.groups] for match in named)

    def chat(self, exchanges: Mapping[str, ExchangeRecorded] | None = None) -> dict[str, Any]:
        """Return the chat completion request. `exchanges`: the recorded calls that `referenced_ids` names, by chat
        completion id; without them the messages lack what the call refers to."""
        request = self.request
        messages: list[dict[str, Any]] = []
        if request.instructions:
            messages.append({"role": "system", "content": request.instructions})
        if exchanges and request.previous_response_id:
            messages += _conversation_of(request.previous_response_id, exchanges)
        if isinstance(request.input, str):
            messages.append({"role": "user", "content": request.input})
        else:
            type_before = ""
            for item in request.input:
                if item.type != "item_reference":
                    add_item(messages, item, type_before)
                elif exchanges:
                    type_before = _add_referenced_item(messages, item.id or "", exchanges, type_before)
                    continue
                type_before = item.type
        chat = self._chat(messages, request.max_output_tokens)
        if self._tools.chat:
            chat["tools"] = self._tools.chat
        if (choice := self._tools.chat_tool_choice(request.tool_choice if request.tools else None)) is not None:
            chat["tool_choice"] = choice
        if (form := response_format(request.text)) is not None:
            chat["response_format"] = form
        return chat

    def whole_answer(self) -> dict[str, Any]:
        """Return the whole response."""
        return self._response("incomplete" if self._hit_token_limit else "completed")

    def first_events(self) -> bytes:
        """Return the events that begin a stream."""
        response = self._response("in_progress", usage=None)
        created = self.event("response.created", response=response)
        return created + self.event("response.in_progress", response=response)

    def begin_block(self, kind: str, call_id: str, name: str) -> bytes:
        """Add an empty output item for a block of `kind` (`reasoning`, `content` or `tool`). Returns the events that
        announce the item and, if it has text, its part; nothing if the answer is not streamed."""
        item: dict[str, Any]
        item_type = "reasoning" if kind == "reasoning" else "message"
        if kind == "tool":
            tool = self._tools.names.get(name) or ToolName(name)
            item_type = "custom_tool_call" if tool.custom else "function_call"
            item = {"call_id": call_id, "name": tool.name, "input" if tool.custom else "arguments": ""}
            item |= {"namespace": tool.namespace} if tool.namespace else {}
        elif kind == "reasoning":
            item = {"summary": [{"type": "summary_text", "text": ""}]}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"role": "assistant", "content": [part]}
        # Calls of both kinds are one list in the chat completion.
        alike = [b for b in self.blocks if b["type"] == item_type or ("call_id" in b and "call_id" in item)]
        item = {"type": item_type, "id": f"{_PREFIXES[item_type]}_{len(alike)}-{self.id}", **item}
        # `item` is as the finished answer shows it; `unfinished` is what the first event shows instead.
        unfinished: dict[str, Any] = {}
        if item_type != "reasoning":
            item["status"], unfinished["status"] = "completed", "in_progress"
        if item_type in _PARTS:
            unfinished[_PARTS[item_type][0]] = []
        self.blocks.append(item)
        if not self.streams:
            return b""
        place = len(self.blocks) - 1
        out = self.event("response.output_item.added", output_index=place, item=item | unfinished)
        return out + self._part_event(place, "added") if item_type in _PARTS else out

    def text_delta(self, place: int, text: str) -> bytes:
        """Return the event for a further piece of an item's text or arguments."""
        kind = self.blocks[place]["type"]
        if kind in _PARTS:
            return self._text_event(place, "delta", delta=text)
        if kind == "function_call":
            return self._item_event(place, "response.function_call_arguments.delta", delta=text)
        return b""  # the text of a custom tool is sent once it is complete

    def end_block(self, place: int) -> bytes:
        """Set the content of a finished item. Returns its closing events if the answer is streamed.

        An item that the token limit cut off, the last one, is marked incomplete; no event says that the input of its
        tool call is done."""
        block, cut = self._set_content(place), self._hit_token_limit and place == len(self.blocks) - 1
        if cut:
            _mark_incomplete(block)
        if not self.streams:
            return b""
        out = b""
        match block["type"]:
            case "function_call" if not cut:
                done = {"arguments": block["arguments"], "name": block["name"]}
                out = self._item_event(place, "response.function_call_arguments.done", **done)
            case "custom_tool_call":
                if block["input"]:
                    out = self._item_event(place, "response.custom_tool_call_input.delta", delta=block["input"])
                if not cut:
                    out += self._item_event(place, "response.custom_tool_call_input.done", input=block["input"])
            case "reasoning" | "message":
                out = self._text_event(place, "done", text=self.text(place)) + self._part_event(place, "done")
        return out + self.event("response.output_item.done", output_index=place, item=block)

    def last_events(self) -> bytes:
        """Return the events that end a stream: those of open items, and the whole response."""
        out = (b"" if self._event_number else self.first_events()) + self.close_blocks()
        response = self.whole_answer()
        return out + self.event("response." + response["status"], response=response)

    def stream_error(self, error: dict[str, Any]) -> bytes:
        """Return the event for an error in the middle of a stream. Open items keep what has come."""
        for place in self.open_blocks:
            _mark_incomplete(self._set_content(place))
        out = b"" if self._event_number else self.first_events()
        shown = {"code": "server_error", "message": error.get("message")}
        return out + self.event("response.failed", response=self._response("failed", error=shown, usage=None))

    # -- events ----------------------------------------------------------------------------------------------------

    def event(self, kind: str, **data: Any) -> bytes:
        """Encode a server-sent event, with the next sequence number."""
        self._event_number += 1
        return super().event(kind, sequence_number=self._event_number - 1, **data)

    def _item_event(self, place: int, kind: str, **data: Any) -> bytes:
        """Return an event about an item."""
        return self.event(kind, item_id=self.blocks[place]["id"], output_index=place, **data)

    def _part_event(self, place: int, what: str) -> bytes:
        """Return the event that an item's only part was added or is done (`what`)."""
        item = self.blocks[place]
        field, kind, _ = _PARTS[item["type"]]
        return self._item_event(place, f"{kind}.{what}", **{f"{field}_index": 0}, part=item[field][0])

    def _text_event(self, place: int, what: str, **text: str) -> bytes:
        """Return the event with a further piece (`what` is `delta`) or the whole (`done`) of an item's text."""
        field, _, kind = _PARTS[self.blocks[place]["type"]]
        logprobs: dict[str, Any] = {"logprobs": []} if field == "content" else {}
        return self._item_event(place, f"{kind}.{what}", **{f"{field}_index": 0}, **text, **logprobs)

    # -- the response ----------------------------------------------------------------------------------------------

    @property
    def _hit_token_limit(self) -> bool:
        """Whether the token limit ended the answer."""
        return self.ended.get("finish_reason") == "length"

    def _set_content(self, place: int) -> dict[str, Any]:
        """Set an item's content to what the model wrote so far: its text, a function call's arguments as JSON text, or
        the input of a custom tool. Returns the item."""
        item, text = self.blocks[place], self.text(place)
        match item["type"]:
            case "function_call":
                item["arguments"] = text
            case "custom_tool_call":
                item["input"] = str((parse_object(text) or {}).get(CUSTOM_INPUT, text))
            case kind:
                item[_PARTS[kind][0]][0]["text"] = text
                if kind == "reasoning" and _INCLUDE_ENCODED in (self.request.include or ()):
                    item["encrypted_content"] = encode_reasoning(text)
        return item

    def _response(self, status: str, **changed: Any) -> dict[str, Any]:
        """Return the response as it is now. `changed` are fields with other values."""
        request = self.request
        return {
            "id": f"{self._prefix}{self.id}",
            "object": "response",
            "created_at": self.head.get("created") or self._created,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "error": None,
            "model": self.head.get("model", request.model),
            "output": self.blocks,
            "instructions": self.instructions,
            "metadata": request.metadata or {},
            "max_output_tokens": request.max_output_tokens,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "tool_choice": request.tool_choice or "auto",
            "tools": msgspec.to_builtins(request.tools or []),
            "previous_response_id": request.previous_response_id,
            "store": self.stored and request.store is not False,
            "text": {"format": (request.text and request.text.format) or {"type": "text"}},
            "usage": _usage(self.usage) if self.usage else None,
            **changed,
        }


def _match_id(pattern: re.Pattern[str], name: str) -> re.Match[str]:
    """Match an id with the `pattern` of this gateway's ids. Raises a 400 `ApiError` if it does not match."""
    if match := pattern.fullmatch(name):
        return match
    raise unknown_reference(name)


def unknown_reference(name: str) -> ApiError:
    """Return the error for a call that refers to an answer which the log does not hold."""
    return ApiError(
        400,
        "previous_response_not_found",
        f"The log holds no answer with the id {name!r} that this call's key may use: it keeps only calls of "
        "trajectories. Send the whole conversation: no previous_response_id and no item_reference (`store: false`).",
        param="input",
    )


def _answer_message(exchange: ExchangeRecorded) -> dict[str, Any]:
    """Return the message of the assistant that a call recorded."""
    (choice,) = msgspec.json.decode(exchange.response)["choices"]
    message: dict[str, Any] = choice["message"]
    return message


def _conversation_of(response_id: str, exchanges: Mapping[str, ExchangeRecorded]) -> list[dict[str, Any]]:
    """Return the chat messages of a recorded call and its answer, without the call's instructions, which OpenAI does
    not carry over either.

    `exchanges`: by chat completion id. That of `response_id` is among them, since the gateway reads all that
    `Translation.referenced_ids` names. Raises a 400 `ApiError` if `response_id` has not the form of this gateway's
    ids."""
    instructed, completion = _match_id(_RESPONSE_ID, response_id).groups()
    exchange = exchanges[completion]
    messages: list[dict[str, Any]] = msgspec.json.decode(exchange.request)["messages"]
    messages = messages[1:] if instructed == "i" else messages
    answer = _answer_message(exchange)
    said = {name: answer[name] for name in ("reasoning", "tool_calls") if answer.get(name)}
    return [*messages, {"role": "assistant", "content": answer.get("content"), **said}]


def _add_referenced_item(
    messages: list[dict[str, Any]], name: str, exchanges: Mapping[str, ExchangeRecorded], type_before: str
) -> str:
    """Add the output item of a recorded response that a client names by its id (`name`) to the messages of a chat
    completion. `type_before`: the type of the item before it. Returns the item's own type. Raises a 400 `ApiError` if
    there is no such tool call."""
    prefix, number, completion = _match_id(_ITEM_ID, name).groups()
    answer, index = _answer_message(exchanges[completion]), int(number)
    match prefix:
        # The model's text is one in a chat completion, so only the first item of its kind holds it.
        case "rs" if not index:
            add_reasoning(messages, answer.get("reasoning") or "")
        case "msg" if not index:
            add_text(messages, answer.get("content") or "", type_before)
        case "fc" | "ctc":
            calls = answer.get("tool_calls") or []
            if index >= len(calls):
                raise unknown_reference(name)
            call = calls[index]
            add_call(messages, call["id"], call["function"]["name"], call["function"]["arguments"])
    return _KIND_OF_PREFIX[prefix]


def _mark_incomplete(item: dict[str, Any]) -> None:
    """Say in an item that its end is missing. Reasoning has no field for it."""
    if "status" in item:
        item["status"] = "incomplete"


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat completion's usage. The API wants every number: 0 where vLLM does not tell it, as cached tokens
    without `--enable-prompt-tokens-details` and reasoning tokens without a reasoning parser."""

    def detail(part: str, name: str) -> int:
        return (usage.get(f"{part}_tokens_details") or {}).get(name) or 0

    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "input_tokens_details": {"cached_tokens": detail("prompt", "cached_tokens")},
        "output_tokens": usage.get("completion_tokens") or 0,
        "output_tokens_details": {"reasoning_tokens": detail("completion", "reasoning_tokens")},
        "total_tokens": usage.get("total_tokens", 0),
    }
