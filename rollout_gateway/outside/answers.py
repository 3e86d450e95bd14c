"""A provider's answer as the record holds it: a chat completion with the provider's own answer in `native`, and the
usage. The bytes for the agent are not touched.

`rollout_gateway.outside.relay` feeds an `OutsideAnswer` with what a provider sends, whole or event by event, and puts
its `answer` and `usage` on the log; `replay_answer` makes a stream of a record for a client's retry. A provider may
send anything: what can't be read ends in `error`, and the record has what could be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from pipeline.config import OutsideConfig
from pipeline.errors import MALFORMED
from rollout_gateway.dialects.calls import MAX_CHOICES, Answer, Fields, Raw, SampledChoice, Tokens
from rollout_gateway.dialects.messages_input import InputMessage, chat_messages
from rollout_gateway.dialects.responses_input import InputItem, add_item
from rollout_gateway.dialects.streaming import replay
from rollout_gateway.http.errors import ApiError
from rollout_gateway.outside.requests import OutsideCall

Document = dict[str, Any]
UNREADABLE = (*MALFORMED, ApiError)
"""What reading an answer raises that is none of its dialect."""
_SENT_WHOLE = frozenset(("id", "index", "name", "role", "type"))
"""Fields of a delta whose text comes whole, and perhaps again in each delta."""
_FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "completed": "stop",
    "in_progress": "",
    "max_output_tokens": "length",
    "refusal": "content_filter",
}
"""The `finish_reason` of a chat completion, by Anthropic's stop reasons and by the states and reasons of OpenAI's
Responses API."""


class Usage(msgspec.Struct, array_like=True):
    """What a call used, in tokens by the provider's count."""

    input: Tokens = 0
    """Cached ones included."""
    cached: Tokens = 0
    written: Tokens = 0
    """Written to the provider's cache."""
    output: Tokens = 0

    def cost_usd(self, table: OutsideConfig) -> float:
        """Return what the provider charges by the prices of its table in the settings, which are for a million
        tokens."""
        cached, written = (
            table.input_usd if price is None else price for price in (table.cached_input_usd, table.cache_write_usd)
        )
        plain = self.input - self.cached - self.written
        millions = plain * table.input_usd + self.cached * cached + self.written * written
        return (millions + self.output * table.output_usd) / 1e6


class OutsideAnswer:
    """One answer, read whole or event by event."""

    def __init__(self, call: OutsideCall, table: OutsideConfig) -> None:
        """`table`: of the provider that answers."""
        self.table, self._call, self._asks_usage = table, call, call.asks_usage(table)
        self.native: Document = {}
        """The answer in the provider's dialect, as far as it has come."""
        self._arguments: dict[int, str] = {}
        """JSON of the inputs of Anthropic's tool calls, by block."""
        self.finishing = False
        """The answer's last part has begun. It reaches the agent after the record."""
        self.ended = False
        """The event has come behind which there is nothing more."""
        self.error = ""
        """The error by which the provider ended the stream, or why the answer can't be read."""

    def read(self, body: bytes) -> None:
        """Read a whole answer."""
        with self._noting_unreadable():
            self.native = msgspec.json.decode(body, type=Document)
            self.ended = True
            if self.native.get("error") and not self.error:
                self.error = f"the provider answered with an error: {_error_text(self.native['error'])}"
            self._choices()

    def feed_event(self, payload: bytes) -> bool:
        """Read the data of a server-sent event. Returns whether the agent gets the event: all but a chunk with the
        usage alone, which only the gateway asked for."""
        if payload == b"[DONE]":
            self.finishing = self.ended = True
        elif payload and not self.ended:
            with self._noting_unreadable():
                return self._read_event(msgspec.json.decode(payload, type=Document))
        return True

    @contextmanager
    def _noting_unreadable(self) -> Iterator[None]:
        """Make `error` of what reading an answer raises, unless there is an error already."""
        try:
            yield
        except UNREADABLE as error:
            self.error = self.error or f"the answer can't be read: {type(error).__name__}: {error}"[:500]

    def _read_event(self, event: Document) -> bool:
        """Read an event of a stream. Returns as `feed_event`."""
        if event.get("error") or event.get("type") == "error":  # the Responses API's has its message beside the type
            message = _error_text(event.get("error") or event)
            self.error, self.finishing = f"the provider ended the stream: {message}", True
            return True
        if self._call.dialect == "chat":
            return self._read_chat_chunk(event)
        if self._call.dialect == "messages":
            self._read_messages_event(event)
        else:
            self._read_responses_event(event)
        return True

    def _read_chat_chunk(self, chunk: Document) -> bool:
        """Merge a chunk of a chat completion into `native`, whose `choices` are a dictionary by index meanwhile.
        Returns as `feed_event`."""
        choices, usage = chunk.pop("choices", None) or [], chunk.pop("usage", None)
        self.native = {**chunk, **self.native}
        if usage:
            self.native["usage"] = usage
        merged: dict[int, Document] = self.native.setdefault("choices", {})
        for choice in choices:
            so_far = merged.setdefault(int(choice.get("index", 0)), {"message": {"role": "assistant", "content": None}})
            _merge_delta(so_far["message"], choice.get("delta") or {})
            so_far["finish_reason"] = choice.get("finish_reason") or so_far.get("finish_reason")
        finished = sum(bool(choice["finish_reason"]) for choice in merged.values())
        self.finishing = self.finishing or finished >= self._call.choices
        return bool(choices or not usage or not self._asks_usage)

    def _read_messages_event(self, event: Document) -> None:
        """Add an event of Anthropic's stream to `native`, the message so far."""
        kind, native = event["type"], self.native
        if kind == "message_start":
            self.native = event["message"]
        elif kind == "content_block_start":
            native["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            block, delta = native["content"][event["index"]], event["delta"]
            match delta["type"]:
                case "input_json_delta":
                    text = self._arguments.get(event["index"], "") + delta["partial_json"]
                    self._arguments[event["index"]] = text
                case "citations_delta":
                    block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
                case _:
                    _merge_delta(block, {name: text for name, text in delta.items() if name != "type"})
        elif kind == "content_block_stop" and event["index"] in self._arguments:
            block = native["content"][event["index"]]
            block["input"] = msgspec.json.decode(self._arguments[event["index"]] or "{}")
        elif kind == "message_delta":
            self.finishing = True
            native |= event["delta"]
            native["usage"] |= {name: n for name, n in (event.get("usage") or {}).items() if n is not None}
        elif kind == "message_stop":
            self.finishing = self.ended = True

    def _read_responses_event(self, event: Document) -> None:
        """Add an event of a stream of OpenAI's Responses API to `native`, the response so far. Each item comes whole
        when it is done."""
        kind, items = event["type"], self.native.get("output", [])
        if isinstance(event.get("response"), dict):
            self.native = event["response"]
            self.finishing = self.ended = kind in ("response.completed", "response.incomplete", "response.failed")
            if kind == "response.failed":
                self.error = f"the provider ended the stream: {_error_text(self.native.get('error'))}"
        elif kind in ("response.output_item.added", "response.output_item.done"):
            items[event["output_index"] : event["output_index"] + 1] = [event["item"]]
        elif kind == "response.output_text.delta":  # counts only until the item is done
            parts = items[event["output_index"]]["content"] or [{"type": "output_text", "text": ""}]
            parts[0]["text"] += event["delta"]
            items[event["output_index"]]["content"] = parts

    # -- the record ------------------------------------------------------------------------------------------------

    def usage(self) -> Usage | None:
        """Return the usage that the provider counted; `None` if it sent none, or none that can be read."""
        try:
            native = self.native.get("usage") or {}
            if self._call.dialect == "messages":
                cached, written = (native.get(f"cache_{what}_input_tokens") or 0 for what in ("read", "creation"))
                counts = (native["input_tokens"] + cached + written, cached, written, native["output_tokens"])
            else:
                first, second = ("prompt", "completion") if self._call.dialect == "chat" else ("input", "output")
                cached = (native.get(f"{first}_tokens_details") or {}).get("cached_tokens") or 0
                counts = (native[f"{first}_tokens"], cached, 0, native[f"{second}_tokens"])
            return msgspec.convert(counts, Usage)
        except UNREADABLE:
            return None

    def answer(self) -> Answer:
        """Return the answer for the record, as far as it has come; without choices if it is no answer of its
        dialect."""
        documents: list[Document] = []
        with self._noting_unreadable():
            documents = self._choices()
        native, used = self.native, self.usage()
        if self._call.dialect == "chat":
            fields = {name: value for name, value in native.items() if name != "choices"}
        else:
            fields = {"model": native.get("model"), "native": native}
            if used is not None:
                fields["usage"] = {
                    "prompt_tokens": used.input,
                    "completion_tokens": used.output,
                    "prompt_tokens_details": {"cached_tokens": used.cached},
                }
        identity = native.get("id")
        fields |= {"id": identity if isinstance(identity, str) else "", "object": "chat.completion"}
        choices = []
        for number, choice in enumerate(documents):
            reason, own = str(choice["finish_reason"] or ""), _encode_fields(choice | {"index": number})
            choices.append(SampledChoice(number, finish_reason=reason, fields=own))
        return Answer(_encode_fields(fields), b"", choices)

    def _choices(self) -> list[Document]:
        """Return the choices of the answer in the form of a chat completion's: one, unless the provider's dialect is
        chat completions. Raises one of `UNREADABLE`."""
        native = self.native
        if self._call.dialect == "chat":
            choices = native["choices"]
            if len(choices) > MAX_CHOICES:
                raise ValueError(f"it has {len(choices):,} choices; at most {MAX_CHOICES:,} are recorded")
            return [
                {**choice, "message": {**choice["message"]}, "finish_reason": choice.get("finish_reason")}
                for choice in (
                    choices if isinstance(choices, list) else [choices[number] for number in sorted(choices)]
                )
            ]
        messages: list[Document] = []
        if self._call.dialect == "messages":
            reason = native.get("stop_reason")
            # Other blocks are what the provider's own tools did, which a chat completion can't hold.
            blocks = [block for block in native["content"] if block["type"] in ("text", "thinking", "tool_use")]
            messages = chat_messages(msgspec.convert({"role": "assistant", "content": blocks}, InputMessage), {})
        else:
            reason = (native.get("incomplete_details") or {}).get("reason") or native.get("status")
            before = ""
            for item in native["output"]:
                # The provider's reasoning is sealed for itself.
                opened = {name: value for name, value in item.items() if name != "encrypted_content"}
                with suppress(msgspec.ValidationError, ApiError):  # what only the provider's own tools know
                    add_item(messages, msgspec.convert(opened, InputItem), before)
                before = item["type"]
        message = messages[0] if messages else {"role": "assistant", "content": None}
        for more in messages[1:]:
            for name in ("content", "reasoning"):
                if more.get(name):
                    message[name] = "\n".join(filter(None, (message.get(name), more[name])))
            if more.get("tool_calls"):
                message["tool_calls"] = message.get("tool_calls", []) + more["tool_calls"]
        finish = (
            "tool_calls"
            if message.get("tool_calls") and reason == "completed"
            else _FINISH_REASONS.get(str(reason), reason)
        )
        return [{"message": message, "finish_reason": finish}]


def replay_answer(call: OutsideCall, recorded: Fields) -> bytes:
    """Convert a recorded answer to the stream that a provider would have sent, each text in one event, for a streaming
    client's retry. It has no usage if only the gateway asked for it."""
    if call.dialect == "chat":
        asks = any(map(call.asks_usage, call.tables))
        return replay({name: value for name, value in recorded.items() if name != "usage" or not asks})
    native = msgspec.json.decode(recorded["native"])
    events = _responses_events(native) if call.dialect == "responses" else _messages_events(native)
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )


def _responses_events(response: Document) -> list[Document]:
    """Return the events of a stream that sends this whole response of OpenAI's Responses API."""
    begun = response | {"output": [], "status": "in_progress", "usage": None}
    events: list[Document] = [{"type": "response.created", "response": begun}]
    for place, item in enumerate(response["output"]):
        at = {"item_id": item.get("id", ""), "output_index": place}
        empty, inner = _events_of_item(item)
        events.append({"type": "response.output_item.added", "output_index": place, "item": empty})
        events += [{**event, **at} for event in inner]
        events.append({"type": "response.output_item.done", "output_index": place, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _events_of_item(item: Document) -> tuple[Document, list[Document]]:
    """Return an item of a Responses answer as a stream's first event about it has it, without its texts, and the events
    that send the texts. An item that is no message or call is returned whole, without events."""
    if item["type"] == "function_call":
        kind, arguments = "response.function_call_arguments", item["arguments"]
        filling = [{"type": f"{kind}.delta", "delta": arguments}, {"type": f"{kind}.done", "arguments": arguments}]
        return item | {"arguments": ""}, filling
    if item["type"] != "message":
        return item, []
    events: list[Document] = []
    for index, part in enumerate(item["content"]):
        at, texts = {"content_index": index}, []
        if part["type"] == "output_text":
            kind, text = "response.output_text", {"logprobs": [], **at}
            texts = [
                {"type": f"{kind}.delta", "delta": part["text"], **text},
                {"type": f"{kind}.done", "text": part["text"], **text},
            ]
        begun = part | {"text": ""} if texts else part
        events += [{"type": "response.content_part.added", "part": begun, **at}, *texts]
        events.append({"type": "response.content_part.done", "part": part, **at})
    return item | {"content": []}, events


def _messages_events(message: Document) -> list[Document]:
    """Return the events of a stream that sends this whole message of Anthropic's API."""
    events: list[Document] = [{"type": "message_start", "message": message | {"content": [], "stop_reason": None}}]
    for place, block in enumerate(message["content"]):
        texts = {name: block[name] for name in ("text", "thinking", "signature") if isinstance(block.get(name), str)}
        deltas: list[Document] = [{"type": f"{name}_delta", name: text} for name, text in texts.items()]
        empty = block | dict.fromkeys(texts, "")
        if "input" in block:
            deltas = [{"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}]
            empty["input"] = {}
        events.append({"type": "content_block_start", "index": place, "content_block": empty})
        events += [{"type": "content_block_delta", "index": place, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": place})
    stop = {name: message.get(name) for name in ("stop_reason", "stop_sequence")}
    return [*events, {"type": "message_delta", "delta": stop, "usage": message["usage"]}, {"type": "message_stop"}]


def _error_text(error: Any) -> str:
    """Return the beginning of a provider's error message. `error`: the error as the provider sent it, of any form."""
    message = error.get("message") or error.get("type") if isinstance(error, dict) else error
    return str(message)[:200]


def _encode_fields(fields: Document) -> Fields:
    """Encode each field by itself."""
    return {name: Raw(msgspec.json.encode(value)) for name, value in fields.items()}


def _merge_delta(into: Document, delta: Document) -> None:
    """Add the delta of a stream to `into`. Texts and lists grow, objects merge, and entries of a list with the same
    `index` are one. Fields of `_SENT_WHOLE` are replaced; of any other number the first one stays."""
    for name, value in delta.items():
        before = into.get(name)
        if before is None or (name in _SENT_WHOLE and value):
            into[name] = [] if isinstance(value, list) else value
            before = into[name]
        elif isinstance(value, str) and name not in _SENT_WHOLE:
            into[name] = before + value
        elif isinstance(value, dict):
            _merge_delta(before, value)
        if isinstance(value, list):
            for entry in value:
                index = entry.get("index") if isinstance(entry, dict) else None
                same = [e for e in before if index is not None and e.get("index") == index]
                if same:
                    _merge_delta(same[0], entry)
                else:
                    before.append(dict(entry) if isinstance(entry, dict) else entry)
