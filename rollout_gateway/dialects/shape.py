"""What is wrong with a call that an inference server can't read.

Servers check requests themselves, so `rollout_gateway.capture.dispatch` looks here only after a server answered a call
with an error of its own (5xx, 404). Such a server is suspected and gets no calls until its health was checked, and a
client's malformed field must not do that."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from rollout_gateway.dialects.calls import Fields

_Media = dict[str, Any] | str


_TextKind = Literal["text", "refusal", "thinking", "reasoning"]
_MediaKind = Literal["image_url", "input_audio", "audio_url", "video_url", "file", "image_embeds", "image_pil"]


class _Part(Struct):
    """A part of a message's content: the kinds that vLLM reads."""

    type: Literal[_TextKind, _MediaKind]
    text: str | None = None
    image_url: _Media | None = None
    input_audio: _Media | None = None
    audio_url: _Media | None = None
    video_url: _Media | None = None
    file: _Media | None = None

    def __post_init__(self) -> None:
        if hasattr(self, self.type) and getattr(self, self.type) is None:
            raise ValueError(f"a part of type `{self.type}` has no `{self.type}`")


class _Function(Struct):
    name: str
    parameters: dict[str, Any] | None = None
    arguments: str | dict[str, Any] = ""


class _Tool(Struct):
    """A tool, or a call of one."""

    function: _Function
    type: Literal["function"] = "function"


class _Message(Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Tool] | None = None


class _Call(Struct):
    messages: list[_Message] = []
    tools: list[_Tool] | None = None
    prompt: str | list[int | str | list[int]] | None = None


def shape_problem(fields: Fields) -> str:
    """Return what is wrong with the messages, tools or prompt of a call; empty if nothing is."""
    raw = {name: fields[name] for name in ("messages", "tools", "prompt") if name in fields}
    try:
        msgspec.json.decode(msgspec.json.encode(raw), type=_Call)
    except msgspec.ValidationError as error:
        return str(error)
    return ""
