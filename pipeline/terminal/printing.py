"""Makes text of agents and models safe to print on a terminal.

Such a text may hold control characters, with which it could clear the screen or look like a line of the command itself.
They are shown as escapes."""

from __future__ import annotations

import os
import re
from typing import Any

from rich.console import Console
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


def with_code(text: str) -> Text:
    """Return a text for a terminal in which the parts between backticks are bold and the backticks are gone."""
    parts = visible(text).split("`")
    return Text.assemble(*((part, "bold" if number % 2 else "") for number, part in enumerate(parts)))


class Output(Console):
    """The console of a program that goes on when its output can't be written: when the reader of a pipe has left, or
    the disk of a file is full. It prints nothing more then."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as rich's console does, unless the output can't be written any more."""
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print nothing more. Rich calls it too, and would end the program."""
        self.quiet = True
        # Python writes what it has buffered at the end of the program, and would fail again.
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, self.file.fileno())
        os.close(null_fd)
