"""A promoted prompt in place of the system prompt that an agent sends, in the body of a call of any dialect.

An operator's decision can give a model name a prompt of its own (`journeywork policy promote --prompt`).
`rollout_gateway.model_calls` puts it into the body before anything else reads it: a call is read, recorded and sent
with the new prompt, as if its agent had sent it: what the model saw is what the log has. Nothing changes unless the
agent's prompt is exactly the one that the decision names."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_gateway.dialects.calls import CHAT, Raw, decode_object
from rollout_gateway.dialects.messages import MessagesTranslation
from rollout_gateway.dialects.responses import ResponsesTranslation
from rollout_gateway.http.body import read_body
from rollout_gateway.http.errors import ApiError

_FIELD = {MessagesTranslation.path: "system", ResponsesTranslation.path: "instructions"}
"""By path, the field of the system prompt, in the APIs that have one."""
_MESSAGES = {CHAT: "messages", ResponsesTranslation.path: "input"}
"""By path, the field of the messages, in the APIs whose first message may be the system prompt."""


class OriginalFields(msgspec.Struct):
    """Fields of a body as the client sent them, before a prompt is put into it."""

    model: str = ""
    metadata: dict[str, Any] | None = None
    instructions: Any = None


def read_original(body: bytes) -> OriginalFields:
    """Read the fields of a body. All are empty if it can't be read: whoever reads the call refuses it."""
    try:
        return read_body(body, OriginalFields)  # bounds its values and depth first
    except ApiError:
        return OriginalFields()


def with_prompt(path: str, body: bytes, replaces: str, prompt: str) -> bytes | None:
    """Return the body of a model call posted to `path`, with `prompt` in place of its system prompt. Returns `None` if
    that is not exactly `replaces`. The bytes of the other fields stay, without the space between them."""
    try:
        fields = decode_object(body)
        for name, change in ((_FIELD.get(path), _replace_in_content), (_MESSAGES.get(path), _replace_in_first_message)):
            if name in fields and (changed := change(fields[name], replaces, prompt)) is not None:
                return msgspec.json.encode({**fields, name: Raw(changed)})
    except (AttributeError, msgspec.MsgspecError, RecursionError, TypeError, UnicodeDecodeError):
        pass  # whoever reads the call says what is wrong with it
    return None


def _replace_in_content(raw: Raw, replaces: str, prompt: str) -> bytes | None:
    """Return a message's content, a text or a list of parts, with `prompt` in place of the text `replaces`; `None` if
    that text is not in it."""
    value = msgspec.json.decode(raw)
    if not isinstance(value, list):
        return msgspec.json.encode(prompt) if value == replaces else None
    # Claude Code has a block of its own before the prompt.
    place = next((n for n, part in enumerate(value) if part.get("text") == replaces), None)
    if place is None:
        return None
    return msgspec.json.encode([*value[:place], {**value[place], "text": prompt}, *value[place + 1 :]])


def _replace_in_first_message(raw: Raw, replaces: str, prompt: str) -> bytes | None:
    """Return messages with `prompt` as the content of the first one; `None` if that is not a system message of exactly
    `replaces`."""
    if not bytes(raw).lstrip().startswith(b"["):
        return None
    messages = msgspec.json.decode(raw, type=list[Raw])
    first = msgspec.json.decode(messages[0]) if messages else {}
    if first.get("role") not in ("system", "developer") or "content" not in first:
        return None
    content = _replace_in_content(Raw(msgspec.json.encode(first["content"])), replaces, prompt)
    return None if content is None else msgspec.json.encode([{**first, "content": Raw(content)}, *messages[1:]])
