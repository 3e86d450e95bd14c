"""The two endpoints of vLLM that give token ids, and how they differ: what to ask for, where it comes, what to remove.

`/v1/responses` and `/v1/messages` are not among them: vLLM gives no ids there, so `translate` makes chat of them.
"""

from __future__ import annotations

from array import array
from typing import Any, ClassVar

import msgspec

from rollout_gateway.dialects.calls import (
    Answer,
    Call,
    Echo,
    Fields,
    Raw,
    RequestParams,
    SampledChoice,
    pack_ids,
    read_fields,
    text,
)
from rollout_gateway.http.errors import ApiError

_encode = msgspec.json.Encoder().encode
_fields_decoder = msgspec.json.Decoder(Fields)
choices_decoder = msgspec.json.Decoder(list[Fields])
_NULL = Raw(b"null")


class Dialect:
    """What is common to both."""

    path: ClassVar[str]
    whole: ClassVar[bytes]
    """`object` of a whole reply."""
    chunk: ClassVar[bytes]
    """`object` of a chunk."""
    asks_logprobs: ClassVar[Raw]
    added: ClassVar[tuple[str, ...]]
    """Fields of a reply that are there because the gateway asked for token ids."""
    added_to_choice: ClassVar[tuple[str, ...]]
    content: ClassVar[str]
    """Field of a whole choice that holds what was said."""
    piece: ClassVar[str]
    """Field of a chunk's choice that holds what was said."""

    def read(self, body: bytes, endpoint: str = "") -> Call:
        """Raises a 400 `ApiError` on what is no such request."""
        raise NotImplementedError

    def logprobs(self, raw: Raw | None) -> bytes:
        """A choice's `logprobs`, packed (little-endian float32, one per token)."""
        raise NotImplementedError

    def is_empty(self, piece: Raw | None) -> bool:
        """Whether a chunk's piece says nothing."""
        raise NotImplementedError

    def join(self, pieces: list[Raw]) -> Raw:
        """What the pieces say together, as a whole choice says it."""
        raise NotImplementedError

    def join_logprobs(self, kept: list[Raw]) -> Raw:
        """The chunks' `logprobs`, as a whole choice has them."""
        raise NotImplementedError

    def upstream_body(self, call: Call, version: str, *, capture: bool) -> bytes:
        """The request for the inference server: the exact version, and ids and logprobs asked for."""
        fields = dict(call.fields)
        fields["model"] = Raw(_encode(version))
        if capture:
            fields["return_token_ids"] = Raw(b"true")
            if not call.params.wants_logprobs:
                self._ask_logprobs(call, fields)
        return _encode(fields)

    def _ask_logprobs(self, call: Call, fields: Fields) -> None:
        """Ask for the logprobs of what is sampled, which the client did not ask for."""
        fields["logprobs"] = self.asks_logprobs

    def read_answer(self, body: bytes, call: Call) -> Answer:
        """Take apart vLLM's reply and remove from it what the client did not ask for.

        Raises `msgspec.DecodeError` or `KeyError` where it is no such reply."""
        asked, echo = call.params, call.echo
        fields = _fields_decoder.decode(body)
        prompt_ids = pack_ids(fields.get("prompt_token_ids"))
        self.clean(fields, asked)
        choices = []
        for position, choice in enumerate(choices_decoder.decode(fields["choices"])):
            ids = pack_ids(choice.get("token_ids")) if echo is None or echo.samples else b""
            sampled = SampledChoice(
                index=int(bytes(choice["index"])) if "index" in choice else position,
                ids=ids,
                logprobs=self.logprobs(choice.get("logprobs"))[-len(ids) :] if ids else b"",
                finish_reason=text(choice.get("finish_reason")),
                fields=choice,
                prompt_ids=pack_ids(choice.get("prompt_token_ids")),
            )
            self.clean_choice(choice, asked)
            if echo is not None:
                choice[self.content] = self.echoed(echo.text(sampled.index), choice.get(self.content))
            choices.append(sampled)
        return Answer(fields, prompt_ids, choices)

    def clean(self, fields: Fields, asked: RequestParams) -> None:
        """Remove from a reply or chunk what the client did not ask for."""
        if not asked.return_token_ids:
            for name in self.added:
                fields.pop(name, None)

    def clean_choice(self, choice: Fields, asked: RequestParams) -> None:
        """Remove from a choice what the client did not ask for."""
        if not asked.return_token_ids:
            for name in self.added_to_choice:
                choice.pop(name, None)
        if not asked.wants_logprobs and "logprobs" in choice:
            choice["logprobs"] = _NULL

    def echoed(self, prompt: str, said: Raw | None) -> Raw:
        """What was said, after its prompt."""
        return Raw(_encode(prompt + text(said)))

    def merged(self, bodies: list[bytes]) -> Fields:
        """The reply that a call's recorded responses, one a choice, were."""
        replies = [_fields_decoder.decode(body) for body in bodies]
        choices = [choice for reply in replies for choice in choices_decoder.decode(reply["choices"])]
        return {**replies[0], "choices": Raw(_encode(choices))}

    def as_stream(self, answer: Fields) -> list[bytes]:
        """A recorded reply as the events of a stream, for a streaming client's retry."""
        top = {k: v for k, v in answer.items() if k not in ("choices", "usage")}
        top["object"] = Raw(self.chunk)
        out = []
        for choice in choices_decoder.decode(answer["choices"]):
            rest = {k: v for k, v in choice.items() if k != self.content}
            out.append(_encode({**top, "choices": [{**rest, self.piece: self.whole_piece(choice)}]}))
        if "usage" in answer:
            out.append(_encode({**top, "choices": [], "usage": answer["usage"]}))
        return out

    def whole_piece(self, choice: Fields) -> Raw:
        """All that a choice says, as one piece."""
        return choice[self.content]


class _ChatAsked(RequestParams, kw_only=True):
    messages: Raw
    top_logprobs: int | None = None


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
    whole, chunk = b'"chat.completion"', b'"chat.completion.chunk"'
    asks_logprobs = Raw(b"true")
    added = ("prompt_token_ids", "prompt_text")
    added_to_choice = ("token_ids", "routed_experts")
    content, piece = "message", "delta"

    def read(self, body: bytes, endpoint: str = "") -> Call:
        fields, asked = read_fields(body, _ChatAsked)
        if (
            asked.top_logprobs and not asked.logprobs
        ):  # the gateway asks for logprobs, so the server would not refuse it
            raise ApiError(
                400,
                "top_logprobs needs logprobs to be true.",
                code="invalid_body",
                param="top_logprobs",
            )
        return Call(body, fields, asked, endpoint or self.path, asked.n or 1)

    def logprobs(self, raw: Raw | None) -> bytes:
        if raw is None:
            return b""
        logprobs = _chat_logprobs_decoder.decode(raw)
        if logprobs is None or not logprobs.content:
            return b""
        return array("f", [entry.logprob for entry in logprobs.content]).tobytes()

    def is_empty(self, piece: Raw | None) -> bool:
        return piece is None or bytes(piece) in (b"{}", b"null")

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

    def join_logprobs(self, kept: list[Raw]) -> Raw:
        content: list[Any] = []
        for raw in kept:
            content += msgspec.json.decode(raw).get("content") or []
        return Raw(_encode({"content": content}))

    def whole_piece(self, choice: Fields) -> Raw:
        message = msgspec.json.decode(choice["message"])
        for position, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = position
        return Raw(_encode(message))


class _Prompted(RequestParams, kw_only=True):
    prompt: Raw
    echo: bool | None = None
    max_tokens: int | None = None


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


_completion_logprobs_decoder = msgspec.json.Decoder(_CompletionLogprobs | None)


class CompletionDialect(Dialect):
    """`/v1/completions`."""

    path = "/v1/completions"
    whole, chunk = b'"text_completion"', b'"text_completion"'
    asks_logprobs = Raw(b"0")
    added = ()
    added_to_choice = ("token_ids", "prompt_token_ids", "routed_experts")
    content, piece = "text", "text"

    def read(self, body: bytes, endpoint: str = "") -> Call:
        fields, asked = read_fields(body, _Prompted)
        prompt = msgspec.json.decode(asked.prompt)
        if not isinstance(prompt, str | list):
            raise ApiError(
                400, "prompt is a text, tokens, or a list of these.", code="invalid_body", param="prompt"
            )
        prompts: list[Any] = [prompt]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            prompts = prompt
        each = asked.n or 1
        echo = None
        if asked.echo:
            texts = prompts if all(isinstance(p, str) for p in prompts) else None
            echo = Echo(prompts, each, asked.max_tokens != 0, texts)
        return Call(body, fields, asked, endpoint or self.path, len(prompts) * each, echo)

    def _ask_logprobs(self, call: Call, fields: Fields) -> None:
        # With `echo` vLLM would also compute the logprobs of the whole prompt, and show them.
        if call.echo is None or call.echo.samples:
            fields["logprobs"] = self.asks_logprobs
            fields.pop("echo", None)

    def logprobs(self, raw: Raw | None) -> bytes:
        if raw is None:
            return b""
        logprobs = _completion_logprobs_decoder.decode(raw)
        if logprobs is None or not logprobs.token_logprobs:
            return b""
        # With `echo` the prompt's tokens come first, and the first of all has no logprob.
        return array("f", [0.0 if value is None else value for value in logprobs.token_logprobs]).tobytes()

    def is_empty(self, piece: Raw | None) -> bool:
        return piece is None or bytes(piece) in (b'""', b"null")

    def join(self, pieces: list[Raw]) -> Raw:
        return Raw(_encode("".join(text(piece) for piece in pieces)))

    def join_logprobs(self, kept: list[Raw]) -> Raw:
        whole: dict[str, list[Any]] = {}
        for raw in kept:
            for name, values in msgspec.json.decode(raw).items():
                whole.setdefault(name, []).extend(values or ())
        return Raw(_encode(whole))


CHAT = ChatDialect()
COMPLETIONS = CompletionDialect()
