"""Calls and answers as the gateway holds them, whichever endpoint they came by (`dialects` knows the differences).

Bodies are taken apart one level deep only (`msgspec.Raw` keeps the rest as it came), so what the gateway does not know
passes through unchanged and costs nothing.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgspec

from rollout_gateway.http.errors import ApiError, invalid_json

Raw = msgspec.Raw
Fields = dict[str, msgspec.Raw]

_fields_decoder = msgspec.json.Decoder(Fields)
_ids_decoder = msgspec.json.Decoder(list[int])
_encode = msgspec.json.Encoder().encode

_GRAMMARS = frozenset(
    (
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structural_tag",
    )
)
_STRICT = re.compile(rb'"strict"\s*:\s*true')


class _Typed(msgspec.Struct):
    type: str = ""


def _type_of(raw: msgspec.Raw | None) -> str:
    try:
        return msgspec.json.decode(raw or b"{}", type=_Typed).type
    except msgspec.ValidationError:
        return ""  # the inference server will say what is wrong with it


class _Message(msgspec.Struct):
    tool_calls: list[msgspec.Raw] | None = None


class RequestParams(msgspec.Struct):
    """What the gateway reads of a request; everything else is the inference server's business."""

    model: str
    stream: bool | None = None
    n: int | None = None
    logprobs: bool | int | None = None
    return_token_ids: bool | None = None
    metadata: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Chat asks with true, completions with a number, which may be 0."""
        return self.logprobs is not None and self.logprobs is not False


_A = TypeVar("_A", bound=RequestParams)


@dataclass(eq=False, slots=True)
class Echo:
    """The prompts of a completion that asked for `echo`.

    vLLM repeats no prompt in a reply that also holds token ids, which the gateway always asks for. So the gateway puts the
    prompt in front of each choice itself."""

    prompts: list[str | list[int]]
    """One for each prompt of the request, as the client sent them."""
    choices: int
    """Choices for each prompt."""
    samples: bool = True
    """False for `max_tokens: 0`: vLLM then samples one token that it does not show."""
    texts: list[str] | None = None
    """The prompts as texts. `None` until token ids among them were decoded by the inference server."""

    def text(self, index: int) -> str:
        """What stands before the choice `index`."""
        assert self.texts is not None
        return self.texts[index // self.choices]


@dataclass(eq=False, slots=True)
class Call:
    """A request, read."""

    body: bytes
    """As the log gets it: what the client sent, or, for a translated endpoint, the chat completion that it became."""
    fields: Fields
    params: RequestParams
    endpoint: str
    """Where the client posted it."""
    choices: int = 1
    """How many choices the answer will have."""
    echo: Echo | None = None
    """Set where the client asked for its prompt in the reply."""

    @property
    def stream(self) -> bool:
        return bool(self.params.stream)

    def hash(self) -> str:
        """SHA-256 of endpoint and canonical body."""
        digest = hashlib.sha256(self.endpoint.encode())
        for name in sorted(self.fields):
            digest.update(b"\0%b\0%b" % (name.encode(), self.fields[name]))
        return digest.hexdigest()

    def forced(self, said: SampledChoice) -> bytes:
        """The mask, a byte a token, of what of a reply was sampled under a grammar; empty: nothing.

        Which tokens a grammar left as they were can't be told from a reply, and the logprobs of the others are those of
        the grammar's distribution, not of the policy's: all count as forced (docs/decisions/0004-forced-tokens.md)."""
        bound = self._bound()
        if not bound or (bound == "calls" and said.ended_without_call()):
            return b""
        return b"\x01" * (len(said.ids) // 4)

    def _bound(self) -> Literal["", "calls", "all"]:
        """What a grammar has a say in: nothing, tool calls if there are any (`strict` tools), or the whole reply."""
        fields = self.fields
        if not _GRAMMARS.isdisjoint(fields) and any(not is_null(fields.get(name)) for name in _GRAMMARS):
            return "all"
        form = fields.get("response_format")
        if not is_null(form) and _type_of(form) != "text":
            return "all"
        tools, choice = fields.get("tools"), fields.get("tool_choice")
        if tools is None or is_null(tools):
            return ""
        chosen = msgspec.json.decode(choice) if choice is not None else None
        if isinstance(chosen, dict) or chosen == "required":
            return "all"
        return "calls" if chosen != "none" and _STRICT.search(bytes(tools)) else ""


def is_null(raw: msgspec.Raw | None) -> bool:
    """Absent or JSON's null."""
    return raw is None or bytes(raw) == b"null"


def pack_ids(raw: msgspec.Raw | None) -> bytes:
    """A JSON list of token ids, packed as the events want it (little-endian int32)."""
    if raw is None or is_null(raw):
        return b""
    return array("i", _ids_decoder.decode(raw)).tobytes()


def text(raw: msgspec.Raw | None) -> str:
    """A JSON string, or nothing for null."""
    if raw is None or is_null(raw):
        return ""
    return str(msgspec.json.decode(raw))


@dataclass(eq=False, slots=True)
class SampledChoice:
    """One choice of a reply: what was sampled, and what the client sees of it."""

    index: int
    ids: bytes = b""
    logprobs: bytes = b""
    finish_reason: str = ""
    fields: Fields = field(default_factory=dict)
    """The choice as the client gets it."""
    prompt_ids: bytes = b""
    """Where each choice has a prompt of its own; else the answer's holds."""

    def ended_without_call(self) -> bool:
        """The model itself ended the reply, and it holds no tool call: a call once begun ends only when it is whole."""
        if self.finish_reason != "stop" or not is_null(self.fields.get("stop_reason")):
            return False
        message = self.fields.get("message")
        return message is not None and not msgspec.json.decode(message, type=_Message).tool_calls


@dataclass(eq=False, slots=True)
class Answer:
    """A whole reply, taken apart."""

    fields: Fields
    prompt_ids: bytes
    choices: list[SampledChoice]
    _body: bytes = b""

    def client_body(self, only: SampledChoice | None = None) -> bytes:
        """The reply for the client; `only`: with one of the choices, as its event holds it."""
        if self._body:
            return self._body  # of one choice: the event and the client get the same
        chosen = self.choices if only is None else [only]
        body = _encode({**self.fields, "choices": [c.fields for c in chosen]})
        if len(self.choices) == 1:
            self._body = body
        return body


def read_fields(body: bytes, kind: type[_A]) -> tuple[Fields, _A]:
    """A request's fields, and those the gateway reads. Raises a 400 `ApiError` on what is no such request."""
    try:
        body.decode()
        return _fields_decoder.decode(body), msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ApiError(
            400, f"The body is not a valid request: {error}.", code="invalid_body", param=_param(str(error))
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(str(error)) from error
    except RecursionError as error:
        raise invalid_json("it is nested too deeply") from error


def _param(message: str) -> str | None:
    """`model` from ``Expected `str`, got `int` - at `$.model` ``."""
    _, at, rest = message.partition("`$.")
    if at:
        return rest.partition("`")[0]
    _, missing, rest = message.partition("missing required field `")
    return rest.partition("`")[0] if missing else None


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
