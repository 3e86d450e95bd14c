"""The two endpoints of vLLM that return token ids, and how they differ.

A dialect says what to add to a request, where the ids and logprobs of a reply are, and what to remove from it.
`/v1/responses` and `/v1/messages` have no dialect: vLLM returns no ids there, so `translate` makes chat completions
of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import Any, ClassVar

import msgspec

from rollout_gateway.dialects.calls import (
    MAX_CHOICES,
    Answer,
    Call,
    Fields,
    Logprobs,
    Raw,
    RequestParams,
    SampledChoice,
    decode_text,
    is_null,
    pack_ids,
    read_fields,
)
from rollout_gateway.http.errors import ApiError

_encode = msgspec.json.Encoder().encode
_fields_decoder = msgspec.json.Decoder(Fields)
choices_decoder = msgspec.json.Decoder(list[Fields])
_NULL = Raw(b"null")
_TRUE = Raw(b"true")


class Dialect(ABC):
    """The common part of both endpoints."""

    path: ClassVar[str]
    object_name: ClassVar[bytes]
    """JSON of `object` in a whole reply."""
    chunk_object_name: ClassVar[bytes]
    """JSON of `object` in a chunk of a stream."""
    logprobs_param: ClassVar[Raw]
    """JSON of `logprobs` in a request that asks for those of the sampled tokens only."""
    added: ClassVar[tuple[str, ...]]
    """Fields of a reply that are there because the gateway asked for token ids."""
    added_to_choice: ClassVar[tuple[str, ...]]
    content: ClassVar[str]
    """Field of a whole choice with its content."""
    piece: ClassVar[str]
    """Field of a chunk's choice with its part of the content."""
    empty_pieces: ClassVar[tuple[bytes, ...]]
    """JSON of parts without content."""

    @abstractmethod
    def read(self, body: bytes) -> Call:
        """Decode a request. Raises a 400 `ApiError` if it is invalid."""

    @abstractmethod
    def logprobs(self, raw: Raw | None) -> bytes:
        """Pack a choice's `logprobs` as little-endian float32, one for each token."""

    @abstractmethod
    def join(self, pieces: list[Raw]) -> Raw:
        """Join the parts of a stream to the content of a whole choice."""

    @abstractmethod
    def join_logprobs(self, parts: list[Raw]) -> Raw:
        """Join the `logprobs` of a stream's chunks to those of a whole choice."""

    def is_empty(self, piece: Raw | None) -> bool:
        """Whether a chunk's part of the content is empty."""
        return is_null(piece) or bytes(piece or b"") in self.empty_pieces

    def upstream_body(self, call: Call, version: str, *, capture: bool) -> bytes:
        """Return the body for the inference server, with the exact policy version. `capture` asks for token ids and
        logprobs."""
        fields = dict(call.fields)
        fields["model"] = Raw(_encode(version))
        if capture:
            fields["return_token_ids"] = _TRUE
            if not call.params.wants_logprobs:
                fields["logprobs"] = self.logprobs_param
        return _encode(fields)

    def read_answer(self, body: bytes, call: Call) -> Answer:
        """Decode vLLM's reply, and remove what the client did not ask for.

        Raises `msgspec.DecodeError` or `KeyError` if it is not such a reply."""
        params = call.params
        fields = _fields_decoder.decode(body)
        prompt_ids = pack_ids(fields.get("prompt_token_ids"))
        self.clean(fields, params)
        choices = []
        for position, choice in enumerate(choices_decoder.decode(fields["choices"])):
            ids = pack_ids(choice.get("token_ids"))
            sampled = SampledChoice(
                index=int(bytes(choice["index"])) if "index" in choice else position,
                ids=ids,
                logprobs=self.logprobs(choice.get("logprobs"))[-len(ids) :] if ids else b"",
                finish_reason=decode_text(choice.get("finish_reason")),
                fields=choice,
                prompt_ids=pack_ids(choice.get("prompt_token_ids")),
            )
            self.clean_choice(choice, params)
            call.add_reference(choice, fields.get("id"))
            choices.append(sampled)
        return Answer(fields, prompt_ids, choices)

    def clean(self, fields: Fields, params: RequestParams) -> None:
        """Remove from a reply or chunk what the client did not ask for."""
        if not params.return_token_ids:
            for name in self.added:
                fields.pop(name, None)

    def clean_choice(self, choice: Fields, params: RequestParams) -> None:
        """Remove from a choice what the client did not ask for."""
        if not params.return_token_ids:
            for name in self.added_to_choice:
                choice.pop(name, None)
        if not params.wants_logprobs and "logprobs" in choice:
            choice["logprobs"] = _NULL

    def merged(self, bodies: list[bytes]) -> Fields:
        """Merge the recorded responses of a call, one for each choice, into the reply that they were."""
        replies = [_fields_decoder.decode(body) for body in bodies]
        choices = [choice for reply in replies for choice in choices_decoder.decode(reply["choices"])]
        return {**replies[0], "choices": Raw(_encode(choices))}

    def as_stream(self, answer: Fields) -> list[bytes]:
        """Convert a recorded reply to the events of a stream, for a streaming client's retry."""
        top = {k: v for k, v in answer.items() if k not in ("choices", "usage")}
        top["object"] = Raw(self.chunk_object_name)
        out = []
        for choice in choices_decoder.decode(answer["choices"]):
            rest = {k: v for k, v in choice.items() if k != self.content}
            out.append(_encode({**top, "choices": [{**rest, self.piece: self.as_piece(choice)}]}))
        if "usage" in answer:
            out.append(_encode({**top, "choices": [], "usage": answer["usage"]}))
        return out

    def as_piece(self, choice: Fields) -> Raw:
        """Convert a whole choice's content to one part of a stream."""
        return choice[self.content]


class _ChatParams(RequestParams, kw_only=True):
    messages: Raw
    top_logprobs: Logprobs | None = None


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _ChatLogprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _FunctionDelta(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _FunctionDelta | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolDelta] | None = None


_chat_logprobs_decoder = msgspec.json.Decoder(_ChatLogprobs | None)
_delta_decoder = msgspec.json.Decoder(_Delta)


class ChatDialect(Dialect):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"
    object_name, chunk_object_name = b'"chat.completion"', b'"chat.completion.chunk"'
    logprobs_param = _TRUE
    added = ("prompt_token_ids", "prompt_text")
    added_to_choice = ("token_ids", "routed_experts")
    content, piece = "message", "delta"
    empty_pieces = (b"{}",)

    def read(self, body: bytes) -> Call:
        fields, params = read_fields(body, _ChatParams)
        if (
            params.top_logprobs and not params.logprobs
        ):  # vLLM would accept it, since the gateway asks for logprobs
            message = "top_logprobs needs logprobs to be true."
            raise ApiError(400, "invalid_body", message, param="top_logprobs")
        return Call(body, fields, params, self.path, params.n or 1)

    def logprobs(self, raw: Raw | None) -> bytes:
        if raw is None:
            return b""
        logprobs = _chat_logprobs_decoder.decode(raw)
        if logprobs is None or not logprobs.content:
            return b""
        return array("f", [entry.logprob for entry in logprobs.content]).tobytes()

    def join(self, pieces: list[Raw]) -> Raw:
        role = "assistant"
        content, reasoning, refusal = [], [], []
        tools: dict[int, dict[str, Any]] = {}
        for raw in pieces:
            delta = _delta_decoder.decode(raw)
            role = delta.role or role
            content.append(delta.content or "")
            reasoning.append(delta.reasoning or "")
            refusal.append(delta.refusal or "")
            for call in delta.tool_calls or ():
                tool = tools.setdefault(
                    call.index, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                )
                tool["id"] = call.id or tool["id"]
                if call.function is not None:
                    tool["function"]["name"] += call.function.name or ""
                    tool["function"]["arguments"] += call.function.arguments or ""
        said = "".join(content)
        message: dict[str, Any] = {"role": role, "content": said if said or not tools else None}
        if any(reasoning):
            message["reasoning"] = "".join(reasoning)
        if any(refusal):
            message["refusal"] = "".join(refusal)
        if tools:
            message["tool_calls"] = [tools[i] for i in sorted(tools)]
        return Raw(_encode(message))

    def join_logprobs(self, parts: list[Raw]) -> Raw:
        content: list[Any] = []
        for raw in parts:
            content += msgspec.json.decode(raw).get("content") or []
        return Raw(_encode({"content": content}))

    def as_piece(self, choice: Fields) -> Raw:
        message = msgspec.json.decode(choice["message"])
        for position, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = position
        return Raw(_encode(message))


class _CompletionParams(RequestParams, kw_only=True):
    prompt: Raw


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float] | None = None


_completion_logprobs_decoder = msgspec.json.Decoder(_CompletionLogprobs | None)


class CompletionDialect(Dialect):
    """`/v1/completions`."""

    path = "/v1/completions"
    object_name, chunk_object_name = b'"text_completion"', b'"text_completion"'
    logprobs_param = Raw(b"0")
    added = ()
    added_to_choice = ("token_ids", "prompt_token_ids", "routed_experts")
    content, piece = "text", "text"
    empty_pieces = (b'""',)

    def read(self, body: bytes) -> Call:
        fields, params = read_fields(body, _CompletionParams)
        prompt = msgspec.json.decode(params.prompt)
        if not isinstance(prompt, str | list):
            message = "prompt must be a string, a list of token ids, or a list of these."
            raise ApiError(400, "invalid_body", message, param="prompt")
        many = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        choices = (len(prompt) if many else 1) * (params.n or 1)
        if choices > MAX_CHOICES:
            message = f"The prompts ask for {choices} choices; one call may ask for {MAX_CHOICES}."
            raise ApiError(400, "invalid_body", message, param="prompt")
        return Call(body, fields, params, self.path, choices)

    def logprobs(self, raw: Raw | None) -> bytes:
        if raw is None:
            return b""
        logprobs = _completion_logprobs_decoder.decode(raw)
        if logprobs is None or not logprobs.token_logprobs:
            return b""
        return array("f", logprobs.token_logprobs).tobytes()

    def join(self, pieces: list[Raw]) -> Raw:
        return Raw(_encode("".join(map(decode_text, pieces))))

    def join_logprobs(self, parts: list[Raw]) -> Raw:
        whole: dict[str, list[Any]] = {}
        for raw in parts:
            for name, values in msgspec.json.decode(raw).items():
                whole.setdefault(name, []).extend(values or ())
        return Raw(_encode(whole))


CHAT = ChatDialect()
COMPLETIONS = CompletionDialect()
