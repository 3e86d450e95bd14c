"""JSON documents in a model's reply, scanned once from left to right: linear time for any text.

Any text may stand between documents. Within a document these deviations are accepted, because they cannot change
which text is a string: trailing commas, a missing comma between objects, single quotes, bare keys, line breaks in
strings, `None` and `True`, `7/10` and `70%` without quotes. A document that breaks off or has another mistake is left
out as a whole. docs/decisions/judge.md compares this with libraries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_OPENING = re.compile(r"[{\[]")
# Quantifiers are possessive, so that a pattern never reads a character twice; a test holds this.
_TOKEN = re.compile(
    r"\s*+(?:(?P<mark>[{}\[\],:])"
    r'|"(?P<double>(?:[^"\\]++|\\.)*+)"'
    r"|'(?P<single>(?:[^'\\]++|\\.)*+)'"
    r"|(?P<word>[^\s{}\[\],:\"']++))",
    re.S,
)
_NUMBER = re.compile(r"[-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+")
_FRACTION = re.compile(r"[-+]?\d++(?:\.\d++)?+(?:/\d++(?:\.\d++)?+|%)")
_CONSTANTS = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
    "NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf"),
}  # fmt: skip
_MAX_WORD = 64
_MAX_DEPTH = 64
_INVALID = object()


class Object(list[tuple[str, Any]]):
    """A JSON object as a list of its members, so that duplicate keys are kept."""


@dataclass(frozen=True)
class Document:
    """One outermost object or list, and its span in the text."""

    value: Any
    start: int
    end: int


@dataclass
class _Frame:
    """An object or list whose end has not been read yet."""

    value: list[Any]
    expects: str
    """`key`, `colon`, `value` or `comma` in an object; `item` or `comma` in a list."""
    key: str = ""

    @classmethod
    def begin(cls, bracket: str) -> _Frame:
        return cls(Object(), "key") if bracket == "{" else cls([], "item")

    @property
    def is_object(self) -> bool:
        return isinstance(self.value, Object)

    def append(self, value: Any) -> None:
        self.value.append((self.key, value) if self.is_object else value)
        self.expects = "comma"

    def accepts_container(self) -> bool:
        return self.expects in ("value", "item") or (self.expects == "comma" and not self.is_object)


def scan_documents(text: str) -> Iterator[Document]:
    """Return every outermost object and list in `text` in order, without broken ones."""
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        document, position = _document(text, opening.start())
        if document is not None:
            yield document


def _document(text: str, start: int) -> tuple[Document | None, int]:
    """Scan the document that begins at `start`. Return it, or `None` if it is broken, and where to go on: never before
    a mistake."""
    stack = [_Frame.begin(text[start])]
    position = start + 1
    while (token := _TOKEN.match(text, position)) is not None:
        top, mark, position = stack[-1], token["mark"], token.end()
        match mark:
            case "{" | "[":
                if not top.accepts_container() or len(stack) >= _MAX_DEPTH:
                    return None, position - 1
                stack.append(_Frame.begin(mark))
            case "}" | "]" if (mark == "}") == top.is_object and top.expects not in ("colon", "value"):
                value = stack.pop().value
                if not stack:
                    return Document(value, start, position), position
                stack[-1].append(value)
            case "," if top.expects == "comma":
                top.expects = "key" if top.is_object else "item"
            case ":" if top.expects == "colon":
                top.expects = "value"
            case None if _take_scalar(top, token):
                pass
            case _:
                return None, position
    return None, len(text)


def _take_scalar(top: _Frame, token: re.Match[str]) -> bool:
    """Take a string, number or word as key or value. Return whether it is allowed there."""
    word = token["word"]
    string = _string(token["double"] if token["double"] is not None else token["single"] or "")
    if top.expects == "key":
        if word is not None and not word.replace("-", "_").isidentifier():
            return False
        top.key, top.expects = (word if word is not None else string), "colon"
        return True
    value = string if word is None else _scalar(word)
    if top.expects not in ("value", "item") or value is _INVALID:
        return False
    top.append(value)
    return True


def _string(raw: str) -> str:
    if "\\" not in raw:
        return raw
    try:
        return str(json.loads(f'"{raw}"', strict=False))
    except ValueError:  # an escape that JSON does not have, or an unescaped quote
        return raw.replace("\\n", "\n").replace('\\"', '"').replace("\\'", "'")


def _scalar(word: str) -> Any:
    """Return the value of an unquoted word: a constant, a number, a fraction as text, or `_INVALID`."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    short = len(word) <= _MAX_WORD
    if _NUMBER.fullmatch(word):
        return float(word) if short else None
    if _FRACTION.fullmatch(word):
        return word if short else None
    return _INVALID
