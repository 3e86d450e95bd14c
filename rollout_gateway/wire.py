"""Between a client's call and vLLM's: what is added on the way there and taken off on the way back.

Bodies are taken apart one level deep only (`msgspec.Raw` keeps the rest as it came), so what the gateway does not know
passes through unchanged and costs nothing.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollout_gateway.errors import ApiError, invalid_json

Raw = msgspec.Raw
Fields = dict[str, msgspec.Raw]

_fields_decoder = msgspec.json.Decoder(Fields)
_choices_decoder = msgspec.json.Decoder(list[Fields])
_ids_decoder = msgspec.json.Decoder(list[int])
_encode = msgspec.json.Encoder().encode
_TRUE = Raw(b"true")

ADDED = ("prompt_token_ids", "prompt_text")
"""Top-level fields that vLLM adds to a reply because the gateway asked for token ids."""
ADDED_TO_CHOICE = ("token_ids", "routed_experts")


class ChatCall(msgspec.Struct):
    """What the gateway reads of a chat completion request; everything else is the inference server's business."""

    model: str
    messages: msgspec.Raw
    stream: bool | None = None
    n: int | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    metadata: dict[str, Any] | None = None


_call_decoder = msgspec.json.Decoder(ChatCall)


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


_logprobs_decoder = msgspec.json.Decoder(_Logprobs | None)


@dataclass(eq=False)
class Call:
    """A chat completion request, read."""

    body: bytes
    """As the client sent it."""
    fields: Fields
    parsed: ChatCall

    @property
    def stream(self) -> bool:
        return bool(self.parsed.stream)

    def hash(self, endpoint: str) -> str:
        """SHA-256 of endpoint and canonical body."""
        digest = hashlib.sha256(endpoint.encode())
        for name in sorted(self.fields):
            digest.update(b"\0%b\0%b" % (name.encode(), self.fields[name]))
        return digest.hexdigest()

    def upstream_body(self, version: str, capture: bool) -> bytes:
        """The request for the inference server: the exact version, and ids and logprobs asked for."""
        fields = dict(self.fields)
        fields["model"] = Raw(_encode(version))
        if capture:
            fields["return_token_ids"] = _TRUE
            fields["logprobs"] = _TRUE
        return _encode(fields)


def read_call(body: bytes) -> Call:
    """Raises a 400 `ApiError` on what is no chat completion request."""
    try:
        body.decode()
        parsed = _call_decoder.decode(body)
        fields = _fields_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"The body is not a valid request: {error}.", param=_param(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(str(error)) from error
    except RecursionError as error:
        raise invalid_json("it is nested too deeply") from error
    return Call(body, fields, parsed)


def _param(message: str) -> str | None:
    """`model` from ``Expected `str`, got `int` - at `$.model` ``."""
    _, at, rest = message.partition("`$.")
    if at:
        return rest.partition("`")[0]
    _, missing, rest = message.partition("missing required field `")
    return rest.partition("`")[0] if missing else None


def is_null(raw: msgspec.Raw | None) -> bool:
    """Absent or JSON's null."""
    return raw is None or bytes(raw) == b"null"


def pack_ids(raw: msgspec.Raw | None) -> bytes:
    """A JSON list of token ids, packed as the events want it (little-endian int32)."""
    if raw is None or is_null(raw):
        return b""
    return array("i", _ids_decoder.decode(raw)).tobytes()


def pack_logprobs(raw: msgspec.Raw | None) -> bytes:
    """A choice's `logprobs`, packed (little-endian float32, one per sampled token)."""
    if raw is None:
        return b""
    logprobs = _logprobs_decoder.decode(raw)
    if logprobs is None or not logprobs.content:
        return b""
    return array("f", [entry.logprob for entry in logprobs.content]).tobytes()


@dataclass(eq=False)
class Sampled:
    """One choice of a reply: what was sampled, and what the client sees of it."""

    index: int
    ids: bytes = b""
    logprobs: bytes = b""
    finish_reason: str = ""
    fields: Fields = field(default_factory=dict)
    """The choice as the client gets it."""


@dataclass(eq=False)
class Answer:
    """A whole reply, taken apart."""

    fields: Fields
    prompt_ids: bytes
    choices: list[Sampled]

    def client_body(self, only: Sampled | None = None) -> bytes:
        """The reply for the client; `only`: with one of the choices, as its event holds it."""
        chosen = self.choices if only is None else [only]
        return _encode({**self.fields, "choices": [c.fields for c in chosen]})


def read_answer(body: bytes, parsed: ChatCall) -> Answer:
    """Take apart vLLM's reply and remove from it what the client did not ask for.

    Raises `msgspec.DecodeError` where it is no chat completion."""
    fields = _fields_decoder.decode(body)
    prompt_ids = pack_ids(fields.get("prompt_token_ids"))
    if not parsed.return_token_ids:
        for name in ADDED:
            fields.pop(name, None)
    choices = []
    for position, choice in enumerate(_choices_decoder.decode(fields["choices"])):
        sampled = Sampled(
            index=int(bytes(choice["index"])) if "index" in choice else position,
            ids=pack_ids(choice.get("token_ids")),
            logprobs=pack_logprobs(choice.get("logprobs")),
            finish_reason=text(choice.get("finish_reason")),
        )
        clean_choice(choice, parsed)
        sampled.fields = choice
        choices.append(sampled)
    return Answer(fields, prompt_ids, choices)


def clean_choice(choice: Fields, parsed: ChatCall) -> None:
    """Remove from a choice what the client did not ask for."""
    if not parsed.return_token_ids:
        for name in ADDED_TO_CHOICE:
            choice.pop(name, None)
    if not parsed.logprobs and "logprobs" in choice:
        choice["logprobs"] = Raw(b"null")


def text(raw: msgspec.Raw | None) -> str:
    if raw is None or is_null(raw):
        return ""
    return str(msgspec.json.decode(raw))


def sse_events(buffer: bytearray, data: bytes) -> Iterator[bytes]:
    """The payloads of the `data:` events that are complete with `data`; the rest stays in `buffer`."""
    buffer += data
    while True:
        end = buffer.find(b"\n\n")
        if end < 0:
            return
        event = bytes(buffer[:end])
        del buffer[: end + 2]
        if event.startswith(b"data: "):
            yield event[6:]
        elif event.startswith(b"data:"):
            yield event[5:].lstrip()


def merged_replies(bodies: list[bytes]) -> Fields:
    """The reply that a call's recorded responses, one a choice, were."""
    replies = [_fields_decoder.decode(body) for body in bodies]
    choices = [choice for reply in replies for choice in _choices_decoder.decode(reply["choices"])]
    return {**replies[0], "choices": Raw(_encode(choices))}
