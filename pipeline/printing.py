"""Makes text of agents and models safe to print on a terminal."""

from __future__ import annotations

import re

from rich.text import Text

_ACTED_ON = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and line feed, and the characters that change the direction of writing."""


def visible(text: str) -> str:
    """Return `text` with each character that a terminal would act on written as its escape, such as `\\x1b`.

    Tasks, messages, replies and reasons are written by agents and models. Printed as they are, they could clear the
    screen, set the window's title or make a line look like another one. Tabs and line feeds stay."""
    return _ACTED_ON.sub(lambda match: ascii(match[0])[1:-1], text)


def visible_json(text: str) -> str:
    """Return JSON with the same characters as JSON's escapes, such as `\\u009b`: the same data."""
    return _ACTED_ON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def with_code(text: str, style: str = "") -> Text:
    """Return a text for a terminal in which the parts between backticks are bold and the backticks are gone."""
    parts = visible(text).split("`")
    return Text.assemble(*((part, f"{style} bold" if at % 2 else style) for at, part in enumerate(parts)))
