"""Model calls and replies, whichever endpoint they came by. `endpoints` knows how the endpoints differ.

A `Call` is a chat completion or a completion that a client asks for, also by another API (`translate`). An `Answer` is
the whole reply to it, with a `SampledChoice` for each of its choices. Capture records both, and takes from here whether
a choice may be trained. Bodies are decoded one level deep only. `msgspec.Raw` keeps the rest as it came, so fields that
the gateway does not know pass through unchanged and cost nothing."""

from __future__ import annotations

import hashlib
import re
from array import array
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rollout_gateway.http.body import read_body
from rollout_gateway.http.errors import invalid_body

Raw = msgspec.Raw
Fields = dict[str, msgspec.Raw]

decode_object = msgspec.json.Decoder(Fields).decode
"""Decodes an object one level deep."""
_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]])

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
"""The endpoints of vLLM that return token ids."""
REFERENCE = "journeywork"
"""Field of a choice that names the recorded call, so that a client can make a run of calls later."""

_NULL = Raw(b"null")
GRAMMAR_FIELDS = frozenset(
    ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag")
)
"""Fields by which a call asks for a reply under a grammar."""
_STRICT = re.compile(rb'"strict"\s*:\s*true')


class _Typed(msgspec.Struct):
    type: str = ""


class _MessageCalls(msgspec.Struct):
    tool_calls: list[msgspec.Raw] | None = None


Seed = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""vLLM's range. Its own error for a longer number does not say what is wrong."""


MAX_CHOICES = 1024
"""Choices of one reply: `n` for each prompt."""
MAX_STOPS, MAX_TOOLS, MAX_MESSAGES = (msgspec.Meta(max_length=length) for length in (128, 1024, 16384))
"""Bounds of lists that an inference server works through for each token or call."""
Choices = Annotated[int, msgspec.Meta(ge=1, le=128)]
Logprobs = Annotated[int, msgspec.Meta(ge=0, le=20)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number of tokens in an answer's usage."""


class RequestParams(msgspec.Struct):
    """The fields of a request that the gateway uses or bounds."""

    model: str
    stream: bool | None = None
    n: Choices | None = None
    logprobs: bool | Logprobs | None = None
    return_token_ids: bool | None = None
    metadata: dict[str, Any] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], MAX_STOPS] | None = None
    messages: Annotated[list[Raw], MAX_MESSAGES] | None = None
    tools: Annotated[list[Raw], MAX_TOOLS] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Chat completions ask with true, completions with a number, which may be 0."""
        return self.logprobs is not None and self.logprobs is not False


_P = TypeVar("_P", bound=RequestParams)


@dataclass(eq=False, slots=True)
class SampledChoice:
    """One choice of a reply: its tokens, and its fields for the client."""

    index: int
    ids: bytes = b""
    """Sampled token ids, little-endian int32."""
    logprobs: bytes = b""
    """Their logprobs, little-endian float32."""
    finish_reason: str = ""
    fields: Fields = field(default_factory=dict)
    """The choice as the client gets it."""
    prompt_ids: bytes = b""
    """The choice's own prompt, if choices have different ones. Otherwise `Answer.prompt_ids` holds."""

    def mean_logprob(self) -> float:
        """Return the mean of the logprobs; 0 without any."""
        values = array("f", self.logprobs)
        return sum(values) / len(values) if values else 0.0

    def ended_without_call(self) -> bool:
        """Whether the model itself ended the reply (not the token limit, not a stop string) without a tool call.

        Then no tool call was begun: under the grammar of `strict` tools the model can stop only after a complete
        one."""
        if self.finish_reason != "stop" or not is_null(self.fields.get("stop_reason")):
            return False
        message = self.fields.get("message")
        return message is not None and not msgspec.json.decode(message, type=_MessageCalls).tool_calls


@dataclass(eq=False, slots=True)
class Answer:
    """A complete reply: of an inference server, or of an outside model (`rollout_gateway.outside`)."""

    fields: Fields
    """Without the choices."""
    prompt_ids: bytes
    """Token ids of the prompt, little-endian int32."""
    choices: list[SampledChoice]
    _body: bytes = b""

    def client_body(self, only: SampledChoice | None = None) -> bytes:
        """Return the reply as the client gets it, with all choices; or with `only` one of them, as the event of this
        choice holds it."""
        if self._body:
            return self._body  # with one choice, the client and the event get the same
        choices = self.choices if only is None else [only]
        body = msgspec.json.encode({**self.fields, "choices": [c.fields for c in choices]})
        if len(self.choices) == 1:
            self._body = body
        return body


@dataclass(eq=False, slots=True)
class Call:
    """A model call: a chat completion or completion that an inference server is to answer."""

    body: bytes
    """The body for the log: the client's, or the chat completion that a call of another API was translated into."""
    fields: Fields
    params: RequestParams
    endpoint: str
    """Path that the client posted it to."""
    choices: int = 1
    """How many choices the reply will have."""
    asks_whole: bool = False
    """Whether the inference server is asked for the whole answer although the client streams. An apprentice's answer is
    not shown if the model was unsure, which only the whole answer tells (`rollout_gateway.model_calls`)."""
    referenced_in: str = ""
    """The trajectory that records the call, if each choice of the reply is to name its exchange; else empty."""
    detected: object = None
    """The run that `rollout_gateway.capture.detection` took for the call, for when the answer comes; `None` if the call
    was not detected. This room does not import its type."""

    @property
    def served_by(self) -> str:
        """The endpoint of vLLM that serves it."""
        return COMPLETIONS if self.endpoint == COMPLETIONS else CHAT

    @property
    def stream(self) -> bool:
        return bool(self.params.stream)

    def add_reference(self, choice: Fields, reply: msgspec.Raw | None) -> None:
        """Add the field that names the recorded call to a choice of the reply whose `id` is `reply`, if the trajectory
        was opened with `references`."""
        if self.referenced_in and reply is not None:
            run = msgspec.json.encode(self.referenced_in)
            choice[REFERENCE] = Raw(b'{"trajectory":%b,"reply":%b}' % (run, bytes(reply)))

    def hash(self) -> str:
        """Return the SHA-256 of the endpoint and the fields in alphabetical order, by which a client's retry is
        known."""
        digest = hashlib.sha256(self.endpoint.encode())
        for name in sorted(self.fields):
            digest.update(b"\0%b\0%b" % (name.encode(), self.fields[name]))
        return digest.hexdigest()

    def forced_mask(self, choice: SampledChoice) -> bytes:
        """Return a mask with one byte for each sampled token, 1 if it was sampled under a grammar ("forced"), which
        keeps it from being trained. Empty if no token was.

        Where a grammar excludes tokens, the recorded logprob is not the policy's. A reply does not tell at which
        positions that happened, so all its tokens count as forced (docs/decisions/capture.md)."""
        grammar = self._grammar()
        if not grammar or (grammar == "tool_calls" and choice.ended_without_call()):
            return b""
        return b"\x01" * (len(choice.ids) // 4)

    def _grammar(self) -> Literal["", "tool_calls", "all"]:
        """Return which part of the reply a grammar constrains: nothing, tool calls if there are any (`strict` tools),
        or the whole reply."""
        fields = self.fields
        form, tools, tool_choice = (fields.get(name, _NULL) for name in ("response_format", "tools", "tool_choice"))
        if any(not is_null(fields.get(name)) for name in GRAMMAR_FIELDS):
            return "all"
        if not is_null(form) and _type_of(form) != "text":
            return "all"
        if is_null(tools):
            return ""
        choice = decode_field(tool_choice, "tool_choice")
        if isinstance(choice, dict) or choice == "required":
            return "all"
        return "tool_calls" if choice != "none" and _STRICT.search(bytes(tools)) else ""


def read_fields(body: bytes, kind: type[_P]) -> tuple[Fields, _P]:
    """Decode a request: all its fields, and those that the gateway uses. Raises a 400 `ApiError` if it is invalid."""
    params = read_body(body, kind)
    return decode_object(body), params


def decode_field(raw: msgspec.Raw, name: str) -> Any:
    """Decode a field that `read_fields` left as it came. Raises a 400 `ApiError` that names it if it can't be decoded,
    such as for a number that is out of range."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise invalid_body(f"`{name}` is not valid: {error}.", name) from error


def is_null(raw: msgspec.Raw | None) -> bool:
    """Whether a field is missing or null."""
    return raw is None or bytes(raw) == b"null"


def pack_ids(raw: msgspec.Raw | None) -> bytes:
    """Pack a JSON list of token ids as little-endian int32. A missing list or null is empty."""
    if raw is None or is_null(raw):
        return b""
    return array("i", _ids_decoder.decode(raw)).tobytes()


def decode_text(raw: msgspec.Raw | None) -> str:
    """Decode a JSON string. A missing one or null is empty."""
    if raw is None or is_null(raw):
        return ""
    return msgspec.json.decode(raw, type=str)


def _type_of(raw: msgspec.Raw) -> str:
    """Return the field `type` of an object; empty for another value."""
    try:
        return msgspec.json.decode(raw, type=_Typed).type
    except msgspec.ValidationError:
        return ""  # the inference server answers with the error
