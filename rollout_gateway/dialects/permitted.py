"""What a caller may ask of an inference server: a list of fields, and the hosts that media come from. Every call that a
policy answers is checked here before it is sent, whichever API it came by.

vLLM takes fields that load pickled tensors, jump its queue or run templates, and it fetches any URL in a message. A
field is sent to the server if it is in `SENT` or `gateway.further_fields`, dropped if it is in `DROPPED` or null, and
refused otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from rollout_gateway.dialects.calls import GRAMMAR_FIELDS, Fields, decode_field, is_null
from rollout_gateway.http.errors import ApiError, invalid_body

_PENALTIES = ("frequency_penalty", "length_penalty", "presence_penalty", "repetition_penalty")
_TOKEN_CHOICE = ("allowed_token_ids", "bad_words", "logit_bias", "min_p", "min_tokens", "stop_token_ids", "top_k")
_ENDS = ("ignore_eos", "include_stop_str_in_output", "thinking_token_budget")
_SPECIAL_TOKENS = ("skip_special_tokens", "spaces_between_special_tokens")
_PROMPT = ("chat_template_kwargs", "truncate_prompt_tokens", "truncation_side")
FURTHER_SAMPLING = frozenset((*_PENALTIES, *_TOKEN_CHOICE, *_ENDS, *_SPECIAL_TOKENS, *_PROMPT, *GRAMMAR_FIELDS))
"""Fields that clients of `/v1/responses` and `/v1/messages` may send as well. Most are vLLM's own."""
_SAMPLING = ("max_completion_tokens", "max_tokens", "n", "seed", "stop", "temperature", "top_p")
_LOGPROBS = ("logprobs", "top_logprobs")
_PROMPT_OF_CHAT = ("add_generation_prompt", "add_special_tokens", "continue_final_message", "documents", "suffix")
_TOOLS = ("parallel_tool_calls", "tool_choice", "tools")
_REASONING = ("include_reasoning", "reasoning_effort")
_ANSWER = ("response_format", "return_token_ids", "return_token_strs", "return_tokens_as_token_ids")
_STREAM = ("stream", "stream_options")
SENT = FURTHER_SAMPLING.union(
    ("model", "messages", "prompt"), _SAMPLING, _LOGPROBS, _PROMPT_OF_CHAT, _TOOLS, _REASONING, _ANSWER, _STREAM
)
"""Fields of a call that reach the inference server."""
_ABOUT_CALLER = ("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "store", "user")
_OF_OPENAIS_MODELS = ("modalities", "moderation", "prediction", "service_tier", "verbosity", "web_search_options")
DROPPED = frozenset((*_ABOUT_CALLER, *_OF_OPENAIS_MODELS))
"""Fields of OpenAI's API that ask nothing of a vLLM server. The log keeps them."""
_TEMPLATE_VALUES = bool | int | float | str | None
_NO_TEMPLATE_VALUES = frozenset(("chat_template", "tokenize", "tools", "documents", "conversation", "messages"))
"""Arguments of the function that renders the prompt, which a template's own values must not replace."""

_URL = re.compile(r"https?://([a-z0-9.-]+)(?::[0-9]+)?(?:[/?#][^\\]*)?", re.IGNORECASE)
_URLS = ("image_url", "audio_url", "video_url")
"""Fields of a part whose URL the server fetches."""
_FORBIDDEN_IN_PARTS = frozenset(("image_embeds", "audio_embeds", "video_embeds", "prompt_embeds", "image_pil", "uuid"))
"""Tensors, and the name under which the server's cache, which all keys share, holds a medium."""


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


_messages_decoder = msgspec.json.Decoder(list[_Message])


def not_permitted(name: str) -> ApiError:
    """Return the error about a field that is unknown or may do harm."""
    message = (
        f"The field `{name}` may not be sent to the inference server. Leave it out, or have the operator name it in "
        "gateway.further_fields."
    )
    return ApiError(400, "field_not_permitted", message, param=name)


class Permitted:
    """The rules of one gateway: `further_fields` may be sent besides `SENT`, media may come from `media_domains`."""

    def __init__(self, further_fields: Iterable[str] = (), media_domains: Iterable[str] = ()) -> None:
        self._may_be_sent = SENT | frozenset(further_fields)
        self._media_domains = frozenset(domain.lower() for domain in media_domains)

    def check(self, fields: Fields) -> None:
        """Delete from `fields` those in `DROPPED`, and unknown ones that are null. Raises a 400 `ApiError` for another
        unknown field, and for values of `chat_template_kwargs` and media that are not permitted."""
        for name in [name for name in fields if name not in self._may_be_sent]:
            if name not in DROPPED and not is_null(fields[name]):
                raise not_permitted(name)
            del fields[name]
        if (values := fields.get("chat_template_kwargs")) is not None:
            self._check_template_values(values)
        if (messages := fields.get("messages")) is not None:
            self._check_media(messages)

    def _check_template_values(self, raw: msgspec.Raw) -> None:
        """Raise a 400 `ApiError` for values of a chat template that are not plain, or replace what is rendered."""
        try:
            values = msgspec.json.decode(raw, type=dict[str, _TEMPLATE_VALUES] | None) or {}
        except msgspec.ValidationError as error:
            message = f"`chat_template_kwargs` takes numbers, strings, true, false and null only: {error}."
            raise invalid_body(message, "chat_template_kwargs") from error
        for name in values.keys() & _NO_TEMPLATE_VALUES:
            param = f"chat_template_kwargs.{name}"
            raise ApiError(400, "field_not_permitted", f"`{param}` is not permitted. Leave it out.", param=param)

    def _check_media(self, raw: msgspec.Raw) -> None:
        """Check the parts of messages. A content that is a text, as of most messages, is skipped undecoded."""
        try:
            contents = [message.content for message in _messages_decoder.decode(raw)]
        except msgspec.ValidationError:
            return  # no list of messages: the inference server answers with the error
        for number, content in enumerate(contents):
            has_parts = bytes(memoryview(content)[:1]) in (b"[", b"{")
            parts = decode_field(content, f"messages[{number}].content") if has_parts else ()
            for part in parts if isinstance(parts, list) else (parts,):
                if isinstance(part, dict):
                    self._check_part(part, f"messages[{number}].content")

    def _check_part(self, part: dict[str, Any], where: str) -> None:
        """Raise a 400 `ApiError` for a tensor, for a name in the server's cache, and for a URL of another host."""
        for name in {*part, str(part.get("type"))} & _FORBIDDEN_IN_PARTS:
            raise ApiError(400, "field_not_permitted", f"`{name}` in {where} is not permitted.", param=where)
        for name in _URLS:
            media = part.get(name)
            url = media.get("url") if isinstance(media, dict) else media
            if not isinstance(url, str) or url[:5].lower() == "data:":
                continue
            match = _URL.fullmatch(url)
            if match is None or match[1].lower() not in self._media_domains:
                named = match[1] if match else url[:100]
                message = (
                    f"{name} in {where} names {named!r}, which is none of vllm.allowed_media_domains. Send the media "
                    "as a data: URL, or have the operator add the domain."
                )
                raise ApiError(400, "media_not_permitted", message, param=where)
