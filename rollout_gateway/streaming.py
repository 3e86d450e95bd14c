"""A streamed reply: cleaned for the client as it passes, and put together again for the log.

From the first chunk that carries a finish reason on, chunks are held back until the exchange is on the log: a client
that acts on the end of a reply can rely on its being recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout_gateway import wire
from rollout_gateway.wire import Answer, ChatCall, Fields, Raw, Sampled

_encode = msgspec.json.Encoder().encode
_fields_decoder = msgspec.json.Decoder(Fields)
_choices_decoder = msgspec.json.Decoder(list[Fields])


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolDelta] | None = None


_delta_decoder = msgspec.json.Decoder(_Delta)


def _is_empty(delta: Raw | None) -> bool:
    return delta is None or bytes(delta) in (b"{}", b"null")


@dataclass(eq=False)
class _Choice:
    """What has come of one choice."""

    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    kept_logprobs: list[Raw] = field(default_factory=list)
    deltas: list[Raw] = field(default_factory=list)
    finish: Fields | None = None


class StreamCapture:
    """Takes the chunks of one reply."""

    def __init__(self, parsed: ChatCall) -> None:
        self._parsed = parsed
        self.prompt_ids = b""
        self._top: Fields = {}
        self._usage: Raw | None = None
        self._choices: dict[int, _Choice] = {}
        self._finished = 0

    @property
    def finished(self) -> bool:
        """Every choice has its finish reason."""
        return self._finished >= (self._parsed.n or 1)

    @property
    def sampled_any(self) -> bool:
        return any(c.ids for c in self._choices.values())

    def take(self, payload: bytes) -> bytes | None:
        """Note a chunk; give what the client is to see of it, none where it held only what the gateway asked for."""
        fields = _fields_decoder.decode(payload)
        if "choices" not in fields:  # an error in mid-stream
            return payload
        if not self._top:
            self._top = {k: v for k, v in fields.items() if k not in ("choices", *wire.ADDED)}
        if "prompt_token_ids" in fields and not self.prompt_ids:
            self.prompt_ids = wire.pack_ids(fields["prompt_token_ids"])
        if not self._parsed.return_token_ids:
            for name in wire.ADDED:
                fields.pop(name, None)
        if not wire.is_null(fields.get("usage")):
            self._usage = fields["usage"]
        choices = _choices_decoder.decode(fields["choices"])
        visible = [c for c in choices if self._take_choice(c)]
        if choices and not visible and "usage" not in fields:
            return None
        return _encode({**fields, "choices": visible})

    def _take_choice(self, choice: Fields) -> bool:
        index = int(bytes(choice["index"])) if "index" in choice else 0
        state = self._choices.setdefault(index, _Choice())
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is not None:
            state.ids += wire.pack_ids(ids)
        if logprobs is not None:
            state.logprobs += wire.pack_logprobs(logprobs)
            if self._parsed.logprobs and not wire.is_null(logprobs):
                state.kept_logprobs.append(logprobs)
        delta = choice.get("delta")
        empty = _is_empty(delta)
        if not empty:
            assert delta is not None
            state.deltas.append(delta)
        wire.clean_choice(choice, self._parsed)
        if not wire.is_null(choice.get("finish_reason")):
            self._finished += 1
            state.finish = {k: v for k, v in choice.items() if k not in ("delta", "logprobs", "token_ids")}
            return True
        return not empty or bool(self._parsed.logprobs) or bool(self._parsed.return_token_ids)

    def answer(self) -> Answer:
        """The reply as if it had not been streamed, as far as it came."""
        fields = {k: v for k, v in self._top.items() if k != "usage"}
        fields["object"] = Raw(b'"chat.completion"')
        if self._usage is not None:
            fields["usage"] = self._usage
        if self._parsed.return_token_ids:
            ids = memoryview(self.prompt_ids).cast("i").tolist()
            fields["prompt_token_ids"] = Raw(_encode(ids))
        return Answer(fields, self.prompt_ids, [self._sampled(i) for i in sorted(self._choices)])

    def _sampled(self, index: int) -> Sampled:
        state = self._choices[index]
        finish = state.finish or {"finish_reason": Raw(b"null")}
        fields: Fields = {
            "index": Raw(str(index).encode()),
            "message": Raw(_encode(_message(state.deltas))),
            "logprobs": _merged_logprobs(state.kept_logprobs),
            **{k: v for k, v in finish.items() if k != "index"},
        }
        if self._parsed.return_token_ids:
            fields["token_ids"] = Raw(_encode(memoryview(bytes(state.ids)).cast("i").tolist()))
        reason = wire.text(finish["finish_reason"])
        return Sampled(index, bytes(state.ids), bytes(state.logprobs), reason, fields)


def _message(deltas: list[Raw]) -> dict[str, Any]:
    role, text, reasoning, refusal = "assistant", "", "", ""
    tools: dict[int, dict[str, Any]] = {}
    for raw in deltas:
        delta = _delta_decoder.decode(raw)
        role = delta.role or role
        text += delta.content or ""
        reasoning += delta.reasoning or ""
        refusal += delta.refusal or ""
        for call in delta.tool_calls or ():
            tool = tools.setdefault(
                call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
            )
            tool["id"] = call.id or tool["id"]
            if call.function is not None:
                tool["function"]["name"] += call.function.name or ""
                tool["function"]["arguments"] += call.function.arguments or ""
    message: dict[str, Any] = {"role": role, "content": text if text or not tools else None}
    if reasoning:
        message["reasoning"] = reasoning
    if refusal:
        message["refusal"] = refusal
    if tools:
        message["tool_calls"] = [tools[i] for i in sorted(tools)]
    return message


def _merged_logprobs(kept: list[Raw]) -> Raw:
    if not kept:
        return Raw(b"null")
    content: list[Any] = []
    for raw in kept:
        content += msgspec.json.decode(raw).get("content") or []
    return Raw(_encode({"content": content}))


def as_stream(answer: Fields) -> list[bytes]:
    """A recorded reply as the events of a stream, for a streaming client's retry."""
    top = {k: v for k, v in answer.items() if k not in ("choices", "usage")}
    top["object"] = Raw(b'"chat.completion.chunk"')
    out = []
    for choice in _choices_decoder.decode(answer["choices"]):
        message = msgspec.json.decode(choice.get("message", Raw(b"{}")))
        for position, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = position
        rest = {k: v for k, v in choice.items() if k != "message"}
        out.append(_encode({**top, "choices": [{**rest, "delta": message}]}))
    if "usage" in answer:
        out.append(_encode({**top, "choices": [], "usage": answer["usage"]}))
    return out
