"""A streamed reply: cleaned for the client as it passes, and assembled for the log.

The chunk with the last finish reason and all chunks after it are held back until the call is on the log. So a client
that acts on the end of a reply can rely on its record. `rollout_gateway.capture.handler` feeds a `StreamCapture` with
what arrives, gives the client what `feed` returns, records `answer`, and then sends `last_events`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from pipeline.events import now_us
from rollout_gateway.dialects.call_ids import FunctionDelta, ToolCallIds, ToolDelta
from rollout_gateway.dialects.calls import (
    Answer,
    Call,
    Fields,
    Raw,
    SampledChoice,
    decode_object,
    decode_text,
    is_null,
    pack_ids,
)
from rollout_gateway.dialects.endpoints import ADDED, check_values, choices_decoder, clean, clean_choice, pack_logprobs
from rollout_gateway.http.event_stream import EventBuffer, event_data

_NULL = Raw(b"null")
DONE = b"data: [DONE]\n\n"


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolDelta] | None = None


_index_decoder = msgspec.json.Decoder(int)
_delta_decoder = msgspec.json.Decoder(_Delta)
_TEXTS = ("content", "reasoning", "refusal")


@dataclass(eq=False)
class _StreamedChoice:
    """What has come of one choice."""

    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    client_logprobs: list[Raw] = field(default_factory=list)
    """The server's `logprobs` of each chunk, for a client that asked for them."""
    deltas: list[_Delta] = field(default_factory=list)
    calls: ToolCallIds = field(default_factory=ToolCallIds)
    finish: Fields | None = None
    """The choice's fields in the chunk with its finish reason; the whole choice has them too. `None` before."""


class StreamCapture:
    """Reads one streamed chat completion, in portions of any size."""

    def __init__(self, call: Call) -> None:
        self._call, self._params, self._expected = call, call.params, call.choices
        self._events = EventBuffer()
        self._prompt_ids = b""
        """Token ids of the prompt, little-endian int32."""
        self._head: Fields = {}
        """The fields of the first chunk that are the reply's, such as its id."""
        self._usage: Raw | None = None
        self._choices: dict[int, _StreamedChoice] = {}
        self._finished = 0
        self._last_events: list[bytes] = []
        self.ended = False
        """`[DONE]` has come."""
        self.error_code = 0
        """The code of the error by which the server ended the stream; 0 if it did not. From 500 on the error is the
        server's own: one that is about to die sends such."""
        self.first_token_at = 0
        """When the first sampled token came, in microseconds since 1970; 0 before."""

    @property
    def last_events(self) -> bytes:
        """The held-back chunks, which the client gets once the exchange is on the log."""
        return b"".join(self._last_events)

    def feed(self, data: bytes) -> bytes:
        """Read the next portion of the stream. Returns the events that the client gets now. Raises
        `msgspec.DecodeError` for an invalid chunk, and `UpstreamError` for one that is too long."""
        out: list[bytes] = []
        for event in self._events.add(data):
            payload = event_data(event)
            self.ended = self.ended or payload == b"[DONE]"
            if payload and not self.ended and (for_client := self._read_chunk(payload)) is not None:
                is_last = self._finished >= self._expected
                (self._last_events if is_last else out).append(b"data: %b\n\n" % for_client)
        return b"".join(out)

    def _read_chunk(self, payload: bytes) -> bytes | None:
        """Read the data of an event. Returns the data for the client, or `None` if it held only what the gateway asked
        for."""
        fields = decode_object(payload)
        check_values(fields)
        if not is_null(fields.get("error")):
            return self._read_error(msgspec.json.decode(fields["error"]))
        if "choices" not in fields:
            return msgspec.json.encode(fields)
        if not self._head:
            self._head = {k: v for k, v in fields.items() if k not in ("choices", "usage", *ADDED)}
        if "prompt_token_ids" in fields:
            # Decoded in each chunk, although the first ones count: what can't be decoded is not passed on.
            ids = pack_ids(fields["prompt_token_ids"])
            self._prompt_ids = self._prompt_ids or ids
        clean(fields, self._params)
        if not is_null(fields.get("usage")):
            self._usage = fields["usage"]
        choices = choices_decoder.decode(fields["choices"])
        visible = [c for c in choices if self._read_choice(c)]
        if choices and not visible and is_null(fields.get("usage")):
            return None
        return msgspec.json.encode({**fields, "choices": visible})

    def _read_error(self, error: Any) -> bytes:
        """Read the error that ends the stream. Returns the event for the client."""
        error = error if isinstance(error, dict) else {"message": str(error)}
        code = error.get("code")
        self.error_code = code if isinstance(code, int) and code else 500
        return msgspec.json.encode({"error": error})

    def _read_choice(self, choice: Fields) -> bool:
        """Read a chunk's choice, and remove what the client did not ask for. Returns whether anything is left for the
        client. Raises `msgspec.DecodeError`."""
        index = _index_decoder.decode(choice["index"]) if "index" in choice else 0
        if not 0 <= index < self._expected:
            raise msgspec.ValidationError(f"a choice has the index {index} where {self._expected} were asked for")
        streamed = self._choices.setdefault(index, _StreamedChoice())
        delta, logprobs = choice.get("delta", _NULL), choice.get("logprobs")
        says_something = bytes(delta) not in (b"null", b"{}")
        if says_something:
            # Before the tokens: if the delta is invalid, the record holds neither its text nor its tokens.
            choice["delta"] = self._read_delta(delta, streamed)
        self._keep_tokens(choice, streamed)
        clean_choice(choice, self._params)
        check_values(choice)
        if self._params.wants_logprobs and logprobs is not None and not is_null(logprobs):
            streamed.client_logprobs.append(logprobs)
        if not is_null(choice.get("finish_reason")):
            decode_text(choice["finish_reason"])
            self._finished += streamed.finish is None
            self._call.add_reference(choice, self._head.get("id"))
            streamed.finish = {k: v for k, v in choice.items() if k not in ("delta", "logprobs", "token_ids")}
            return True
        return says_something or self._params.wants_logprobs or bool(self._params.return_token_ids)

    def _keep_tokens(self, choice: Fields, streamed: _StreamedChoice) -> None:
        """Keep the token ids of a chunk's choice, and as many logprobs, which the record needs."""
        ids, logprobs = pack_ids(choice.get("token_ids")), pack_logprobs(choice.get("logprobs"))
        if ids:
            self.first_token_at = self.first_token_at or now_us()
            streamed.ids += ids
            streamed.logprobs += logprobs[-len(ids) :]

    def _read_delta(self, raw: Raw, streamed: _StreamedChoice) -> Raw:
        """Read the delta of a chunk's choice. Returns it as the client gets it: with the positions and ids that
        `ToolCallIds` gives its tool calls, and with one entry for each call.

        vLLM sends name and arguments as two entries if one chunk holds both, as chunks do under load. OpenAI's Python
        client keeps the first of them only."""
        fields, delta = msgspec.json.decode(raw), _delta_decoder.decode(raw)
        reply, calls = self._head.get("id"), delta.tool_calls or []
        changed = [streamed.calls.assign(call, number, reply) for number, call in enumerate(calls)]
        streamed.deltas.append(delta)
        if not any(changed) and len({call.index for call in calls}) == len(calls):
            return raw
        joined: dict[int | None, Any] = {}
        for entry, call in zip(fields["tool_calls"], calls, strict=True):
            first = joined.get(call.index)
            if first is None:
                joined[call.index] = entry | {"index": call.index, "id": call.id}
            else:
                first["function"] = _join_functions(first.get("function"), entry.get("function"))
        return Raw(msgspec.json.encode(fields | {"tool_calls": list(joined.values())}))

    def answer(self) -> Answer:
        """Return the reply as if it had not been streamed, as far as it has come."""
        fields = dict(self._head)
        if fields:
            fields["object"] = Raw(b'"chat.completion"')
        if self._usage is not None:
            fields["usage"] = self._usage
        if self._params.return_token_ids and self._prompt_ids:
            fields["prompt_token_ids"] = _id_list(self._prompt_ids)
        return Answer(fields, self._prompt_ids, [self._sampled_choice(i) for i in sorted(self._choices)])

    def _sampled_choice(self, index: int) -> SampledChoice:
        """Return a choice as if it had not been streamed."""
        streamed = self._choices[index]
        finish = streamed.finish or {"finish_reason": _NULL}
        fields: Fields = {
            "index": Raw(str(index).encode()),
            "message": _join_deltas(streamed.deltas),
            "logprobs": _join_logprobs(streamed.client_logprobs) if streamed.client_logprobs else _NULL,
            **{k: v for k, v in finish.items() if k != "index"},
        }
        if self._params.return_token_ids:
            fields["token_ids"] = _id_list(bytes(streamed.ids))
        reason = decode_text(finish["finish_reason"])
        return SampledChoice(index, bytes(streamed.ids), bytes(streamed.logprobs), reason, fields)


def _id_list(packed: bytes) -> Raw:
    """Return packed token ids as a JSON list."""
    return Raw(msgspec.json.encode(memoryview(packed).cast("i").tolist()))


def _join_deltas(deltas: list[_Delta]) -> Raw:
    """Join the deltas of a stream to the message of a whole choice, as vLLM writes it: `content` is `None` if there are
    tool calls and no text.

    Texts, a function's name and its arguments come in parts. The id of a tool call comes whole, in one delta or again
    in each. The calls are in the order in which they began."""
    tools: dict[int | None, dict[str, Any]] = {}
    arguments: dict[int | None, list[str]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls or ()):
        tool = tools.setdefault(call.index, {"id": "", "type": "function", "function": {"name": ""}})
        tool["id"] = call.id or tool["id"]
        function = call.function or FunctionDelta()
        tool["function"]["name"] += function.name or ""
        # Joined at the end: in a dictionary, `+=` copies the whole text each time.
        arguments.setdefault(call.index, []).append(function.arguments or "")
    for index, tool in tools.items():
        tool["function"]["arguments"] = "".join(arguments[index])
    role = next((delta.role for delta in reversed(deltas) if delta.role), "assistant")
    texts = {name: "".join([getattr(delta, name) or "" for delta in deltas]) for name in _TEXTS}
    content = texts.pop("content")
    message: dict[str, Any] = {"role": role, "content": content if content or not tools else None}
    message |= {name: text for name, text in texts.items() if text}
    if tools:
        message["tool_calls"] = list(tools.values())
    return Raw(msgspec.json.encode(message))


def _join_functions(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any]:
    """Join two parts of one tool call's `function`: their names and their arguments are pieces of one text each."""
    first, second = first or {}, second or {}
    pieces = {name: (first.get(name), second.get(name)) for name in ("name", "arguments")}
    texts = {name: "".join(filter(None, both)) for name, both in pieces.items() if both != (None, None)}
    return {**(first or second), **texts}


def _join_logprobs(parts: list[Raw]) -> Raw:
    """Join the `logprobs` of a choice's chunks."""
    content = [entry for raw in parts for entry in msgspec.json.decode(raw).get("content") or ()]
    return Raw(msgspec.json.encode({"content": content}))


def replay(answer: Fields) -> bytes:
    """Return a recorded chat completion as a stream of one chunk for each choice, for a streaming client's retry."""
    head = {k: v for k, v in answer.items() if k not in ("choices", "usage")}
    head["object"] = Raw(b'"chat.completion.chunk"')
    chunks: list[Any] = []
    for choice in choices_decoder.decode(answer["choices"]):
        message = msgspec.json.decode(choice.pop("message"))
        for position, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = position
        chunks.append({**head, "choices": [{**choice, "delta": message}]})
    if "usage" in answer:
        chunks.append({**head, "choices": [], "usage": answer["usage"]})
    return b"".join(b"data: %b\n\n" % msgspec.json.encode(chunk) for chunk in chunks) + DONE
