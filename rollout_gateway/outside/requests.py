"""A call of an outside model: the bytes for the provider, and the chat completion request for the record.

A dialect is one of the three APIs that providers speak: chat completions, OpenAI's responses, Anthropic's messages.
`rollout_gateway.outside.relay` reads calls here. The provider gets the agent's bytes with another name of the model;
the log gets the call as a chat completion, so that the outside model's calls can be judged and compared like the
policy's."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.config import OutsideConfig
from rollout_gateway.dialects.calls import CHAT, Call, Fields, RequestParams, decode_object
from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.responses import ResponsesTranslation
from rollout_gateway.dialects.translate import Translation
from rollout_gateway.http.body import read_body
from rollout_gateway.http.errors import ApiError, invalid_body
from rollout_gateway.http.request import Headers

PATHS = {"chat": CHAT, "responses": ResponsesTranslation.path, "messages": MessagesTranslation.path}
"""Where agents post the calls of a dialect. Providers have the same paths below their own URL."""

_HEADERS_TO_PROVIDER = frozenset(
    b"accept anthropic-beta anthropic-version content-type idempotency-key openai-beta user-agent".split()
)
"""Headers of an agent that a provider gets, besides those that begin with `x-stainless-`."""
_HEADERS_NOT_TO_AGENT = frozenset(
    b"connection content-encoding content-length keep-alive proxy-authenticate proxy-connection set-cookie te trailer "
    b"transfer-encoding upgrade".split()
)
"""Headers of a provider that an agent does not get, besides those that begin with `x-journeywork-`: those of one
connection, and cookies, which are another origin's."""
_FIELD_NAME = re.compile(rb'[{,]?\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_SPACE = re.compile(rb"\s*")
_MAX_FIELDS = 1000


class _Named(msgspec.Struct):
    model: str


class _UsedFields(_Named):
    """What the gateway reads of a request. Other types than these are the provider's to refuse."""

    stream: Any = None
    n: Any = None
    metadata: Any = None


@dataclass(eq=False, slots=True, kw_only=True)
class OutsideCall(Call):
    """A call of an outside model. `body` and `fields` are those of the record."""

    sent: bytes
    """The body as the agent sent it."""
    model_place: tuple[int, int]
    """Where the value of `model` begins and ends in `sent`."""
    tables: list[OutsideConfig]
    """The tables of the model that speak the call's dialect, in the order in which they are asked."""

    @property
    def dialect(self) -> str:
        return self.tables[0].dialect

    def asks_usage(self, table: OutsideConfig) -> bool:
        """Whether the provider is asked for the usage although the agent does not ask."""
        wanted = self.dialect == "chat" and self.stream and table.ask_usage
        return wanted and "stream_options" not in self.fields

    def hash(self) -> str:
        """Return the SHA-256 of the endpoint and the body as it was sent: the record may lack parts of it."""
        return hashlib.sha256(self.endpoint.encode() + b"\0" + self.sent).hexdigest()

    def body_for(self, table: OutsideConfig) -> bytes:
        """Return the body for a provider: the agent's bytes with the provider's name of the model."""
        body, (start, end) = self.sent, self.model_place
        if table.model not in ("", table.name):
            body = body[:start] + msgspec.json.encode(table.model) + body[end:]
        if self.asks_usage(table):
            start = body.index(b"{") + 1
            body = body[:start] + b'"stream_options":{"include_usage":true},' + body[start:]
        return body


def read_call(path: str, body: bytes, tables: dict[str, list[OutsideConfig]]) -> OutsideCall | None:
    """Return the call if it names an outside model, by name in `tables`. `None`: it is another call, or can't be read,
    which is for the reader of such calls to say. Raises a 400 `ApiError` if no provider speaks the dialect, or the body
    has too many values or names a field twice."""
    try:
        known = tables.get(msgspec.json.decode(body, type=_Named).model)
    except (msgspec.DecodeError, RecursionError):
        return None
    if known is None:
        return None
    head = read_body(body, _UsedFields)  # its values are bounded before more of it is decoded
    speaking = [table for table in known if PATHS[table.dialect] == path]
    if not speaking:
        there = ", ".join(dict.fromkeys(PATHS[table.dialect] for table in known))
        message = f"The outside model {head.model!r} does not speak {path}. Post the call to {there}."
        raise ApiError(400, "wrong_dialect", message, param="model")
    place = _find_model(body, decode_object(body))
    metadata = head.metadata if isinstance(head.metadata, dict) else None
    params = RequestParams(head.model, head.stream is True, metadata=metadata)
    choices = head.n if isinstance(head.n, int) and 0 < head.n <= 128 else 1
    recorded = _as_chat(speaking[0].dialect, body)
    fields = decode_object(recorded)
    return OutsideCall(recorded, fields, params, path, choices, sent=body, model_place=place, tables=speaking)


def headers_for(headers: Headers, dialect: str, key: str) -> dict[str, str]:
    """Return the headers for a provider: those of the agent's that pass and are UTF-8, as the client sends nothing
    else."""
    passed = {}
    for header, value in headers.items():
        with suppress(UnicodeDecodeError):
            if header in _HEADERS_TO_PROVIDER or header.startswith(b"x-stainless-"):
                passed[header.decode()] = value.decode()
    passed["accept-encoding"] = "identity"  # the gateway reads the answer
    if key:
        name, secret = ("x-api-key", key) if dialect == "messages" else ("authorization", f"Bearer {key}")
        passed[name] = secret
    return passed


def is_passed_to_agent(header: bytes) -> bool:
    """Whether the agent gets this header of the provider's answer. `header`: its name in lower case."""
    return header not in _HEADERS_NOT_TO_AGENT and not header.startswith(b"x-journeywork-")


def _find_model(body: bytes, fields: Fields) -> tuple[int, int]:
    """Return where the value of `model` begins and ends in a body, whose decoded fields are `fields`. Raises a 400
    `ApiError` for a body that two programs could read as naming two models: it has a field twice, or `model` in another
    case. A body with more than `_MAX_FIELDS` fields is refused too, since the check would take too long."""
    start = end = 0
    place = _SPACE.match(body).end()  # type: ignore[union-attr]  # also of nothing
    for name, value in fields.items() if len(fields) <= _MAX_FIELDS else ():
        if name != "model" and name.lower() == "model":
            raise invalid_body(f"The body has {name!r} beside `model`: leave it out.", name)
        key, raw = _FIELD_NAME.match(body, place), bytes(value)
        if key is None or not body.startswith(raw, key.end()):
            break
        place = key.end() + len(raw)
        if name == "model":
            start, end = key.end(), place
        place = _SPACE.match(body, place).end()  # type: ignore[union-attr]
    if not start or body[place:].strip() != b"}":
        raise invalid_body(f"The body has a field twice, or more than {_MAX_FIELDS:,} fields: send each once.")
    return start, end


def _as_chat(dialect: str, body: bytes) -> bytes:
    """Return the body of a call, posted in `dialect`, as that of a chat completion for the record. One that can't be
    translated is returned as it is."""
    if dialect == "chat":
        return body
    try:
        request = msgspec.json.decode(body)
        translation: Translation
        if dialect == "messages":
            # What the provider runs itself has no schema.
            tools = request.get("tools") or []
            request["tools"] = [t for t in tools if t.get("input_schema") or t.get("type", "custom") == "custom"]
            translation = MessagesTranslation(msgspec.json.encode(request))
        else:
            # The gateway wrote none of these ids and encoded none of this reasoning.
            for name in ("previous_response_id", "background"):
                request.pop(name, None)
            if isinstance(request["input"], list):
                request["input"] = [item for item in request["input"] if item.get("type") != "item_reference"]
                for item in request["input"]:
                    item.pop("encrypted_content", None)
            translation = ResponsesTranslation(msgspec.json.encode(request))
        return translation.call().body
    except (ApiError, msgspec.DecodeError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError):
        return body
