"""The two endpoints of vLLM that return token ids, chat completions and completions: what is asked of them, and what is
removed from their replies.

The gateway asks for token ids and logprobs with every captured call, whether or not the client did, and removes what
the client did not ask for. Capture (`rollout_gateway.capture.handler`, `dispatch`) calls `upstream_body` and
`read_answer`. `/v1/responses` and `/v1/messages` are not asked: vLLM returns no ids there, so `translate` makes chat
completions of them."""

from __future__ import annotations

from array import array
from typing import Annotated, Any

import msgspec

from rollout_gateway.dialects.call_ids import new_call_id
from rollout_gateway.dialects.calls import (
    CHAT,
    COMPLETIONS,
    MAX_CHOICES,
    MAX_MESSAGES,
    Answer,
    Call,
    Fields,
    Logprobs,
    Raw,
    RequestParams,
    SampledChoice,
    Tokens,
    decode_field,
    decode_object,
    decode_text,
    pack_ids,
    read_fields,
)
from rollout_gateway.http.errors import ApiError, invalid_body

choices_decoder = msgspec.json.Decoder(list[Fields])
_index_decoder = msgspec.json.Decoder(int)
_NULL = Raw(b"null")
_TRUE = Raw(b"true")
_SAMPLED_ONLY = {CHAT: _TRUE, COMPLETIONS: Raw(b"0")}
"""JSON of `logprobs` in a request that asks for those of the sampled tokens only."""
ADDED = ("prompt_token_ids", "prompt_text")
"""Fields of a reply, and of a chunk, that are there because the gateway asked for token ids."""
_ADDED_TO_CHOICE = ("token_ids", "prompt_token_ids")


class _ChatParams(RequestParams, kw_only=True):
    messages: Annotated[list[Raw], MAX_MESSAGES]
    logprobs: bool | None = None
    """vLLM takes numbers too and reads 0 as false; the record would lack its logprobs."""
    top_logprobs: Logprobs | None = None


class _CompletionParams(RequestParams, kw_only=True):
    prompt: Raw


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None
    """Of a chat completion."""
    token_logprobs: list[float] | None = None
    """Of a completion."""


_logprobs_decoder = msgspec.json.Decoder(_Logprobs | None)


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens = 0
    completion_tokens: Tokens | None = 0
    total_tokens: Tokens = 0
    prompt_tokens_details: dict[str, Any] | None = None
    completion_tokens_details: dict[str, Any] | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None


_usage_decoder = msgspec.json.Decoder(_Usage | None)
_value_decoder = msgspec.json.Decoder()
_TYPED = frozenset(("choices", "message", "delta", "usage", "prompt_token_ids", "token_ids"))
"""Fields of a reply or a choice that have decoders of their own."""
MALFORMED = (msgspec.DecodeError, KeyError, RecursionError, UnicodeDecodeError)
"""What reading a reply raises if it is not one of vLLM's."""


def read_chat(body: bytes) -> Call:
    """Decode a request of `/v1/chat/completions`. Raises a 400 `ApiError` if it is invalid."""
    fields, params = read_fields(body, _ChatParams)
    # vLLM would accept it, since the gateway asks for logprobs.
    if params.top_logprobs and not params.logprobs:
        raise invalid_body("top_logprobs needs logprobs to be true.", "top_logprobs")
    return Call(body, fields, params, CHAT, params.n or 1)


def read_completion(body: bytes) -> Call:
    """Decode a request of `/v1/completions`. Raises a 400 `ApiError` if it is invalid, or asks for a stream."""
    fields, params = read_fields(body, _CompletionParams)
    if params.stream:
        message = "/v1/completions is not streamed: ask for the whole reply, or for a chat completion."
        raise ApiError(400, "unsupported", message, param="stream")
    prompt = decode_field(params.prompt, "prompt")
    if not isinstance(prompt, str | list):
        raise invalid_body("prompt must be a string, a list of token ids, or a list of these.", "prompt")
    has_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    choices = (len(prompt) if has_several else 1) * (params.n or 1)
    if choices > MAX_CHOICES:
        raise invalid_body(f"The prompts ask for {choices} choices; one call may ask for {MAX_CHOICES}.", "prompt")
    return Call(body, fields, params, COMPLETIONS, choices)


def upstream_body(call: Call, version: str, *, answer_id: str) -> bytes:
    """Return the body for the inference server, which is asked for the exact policy version. `answer_id`: the id that
    the answer will have; empty if the call is not captured. A captured call asks for token ids and logprobs too."""
    fields = dict(call.fields)
    fields["model"] = Raw(msgspec.json.encode(version))
    if call.asks_whole:
        fields = {name: raw for name, raw in fields.items() if name not in ("stream", "stream_options")}
    if answer_id:
        fields["request_id"] = Raw(msgspec.json.encode(answer_id))
        fields["return_token_ids"] = _TRUE
        if not call.params.wants_logprobs:
            fields["logprobs"] = _SAMPLED_ONLY[call.served_by]
    return msgspec.json.encode(fields)


def read_answer(body: bytes, call: Call) -> Answer:
    """Decode vLLM's reply, and remove what the client did not ask for.

    Raises one of `MALFORMED` if it is not such a reply."""
    params = call.params
    fields = decode_object(body)
    prompt_ids = pack_ids(fields.get("prompt_token_ids"))
    clean(fields, params)
    check_values(fields)
    choices: list[SampledChoice] = []
    for position, choice in enumerate(choices_decoder.decode(fields["choices"])):
        if call.served_by == CHAT:
            choice["message"] = _read_message(choice["message"], fields.get("id"))
        ids = pack_ids(choice.get("token_ids"))
        sampled = SampledChoice(
            index=_index_decoder.decode(choice["index"]) if "index" in choice else position,
            ids=ids,
            logprobs=pack_logprobs(choice.get("logprobs"))[-len(ids) :] if ids else b"",
            finish_reason=decode_text(choice.get("finish_reason")),
            fields=choice,
            prompt_ids=pack_ids(choice.get("prompt_token_ids")),
        )
        clean_choice(choice, params)
        check_values(choice)
        call.add_reference(choice, fields.get("id"))
        choices.append(sampled)
    if sorted(choice.index for choice in choices) != list(range(call.choices)):
        message = f"it has {len(choices)} choices where {call.choices} were asked for, or two with one index"
        raise msgspec.ValidationError(message)
    return Answer(fields, prompt_ids, choices)


def check_values(fields: Fields) -> None:
    """Raise one of `MALFORMED` if a reply, chunk or choice holds a value that can't be decoded. Undetected, the value
    would fail only when the record is read, or in the middle of a translation."""
    for name, raw in fields.items():
        if name not in _TYPED:
            _value_decoder.decode(raw)
    if "usage" in fields:
        _usage_decoder.decode(fields["usage"])


def _read_message(raw: Raw, reply_id: Raw | None) -> Raw:
    """Check the message of a choice, and give an id to each of its tool calls to which the server gave none, made of
    the reply's id and the call's position. Raises one of `MALFORMED`."""
    message = _value_decoder.decode(raw)
    calls = msgspec.convert(message, _Message).tool_calls or ()
    if all(call.id for call in calls):
        return raw
    for position, call in enumerate(message["tool_calls"]):
        call["id"] = call.get("id") or new_call_id(reply_id, position)
    return Raw(msgspec.json.encode(message))


def clean(fields: Fields, params: RequestParams) -> None:
    """Remove from a reply or chunk what the client did not ask for."""
    if not params.return_token_ids:
        for name in ADDED:
            fields.pop(name, None)


def clean_choice(choice: Fields, params: RequestParams) -> None:
    """Remove from a choice what the client did not ask for."""
    if not params.return_token_ids:
        for name in _ADDED_TO_CHOICE:
            choice.pop(name, None)
    if not params.wants_logprobs and "logprobs" in choice:
        choice["logprobs"] = _NULL


def pack_logprobs(raw: Raw | None) -> bytes:
    """Pack a choice's `logprobs` as little-endian float32, one for each token. The bytes are empty if the field is
    missing or null."""
    logprobs = _logprobs_decoder.decode(raw) if raw is not None else None
    if logprobs is None:
        return b""
    return array("f", logprobs.token_logprobs or [entry.logprob for entry in logprobs.content or ()]).tobytes()


def merge_responses(bodies: list[bytes]) -> Fields:
    """Return the whole reply to a call, from the recorded responses of its events, of which each holds one choice. For
    a client's retry."""
    replies = [decode_object(body) for body in bodies]
    choices = [choice for reply in replies for choice in choices_decoder.decode(reply["choices"])]
    return {**replies[0], "choices": Raw(msgspec.json.encode(choices))}
