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


class _BrokenError(Exception):
    """A document has a mistake. The scan goes on at `position`, never before it."""

    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position


def scan_documents(text: str) -> Iterator[Document]:
    """Return every outermost object and list in `text` in order, without broken ones."""
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        start = opening.start()
        try:
            value, position = _container(text, start, 1)
        except _BrokenError as broken:
            position = max(broken.position, start + 1)
        else:
            yield Document(value, start, position)


def _container(text: str, start: int, depth: int) -> tuple[list[Any], int]:
    """Return the object or list that begins at `start`, and its end. Raises `_BrokenError`."""
    is_object, closing = text[start] == "{", "}" if text[start] == "{" else "]"
    container: list[Any] = Object() if is_object else []
    token = _token(text, start + 1)
    while token["mark"] != closing:
        key = ""
        if is_object:
            if token["mark"] or not (key := _key(token)):
                raise _mistake(token)
            if (token := _token(text, token.end()))["mark"] != ":":
                raise _mistake(token)
            token = _token(text, token.end())
        value, end = _value(text, token, depth)
        container.append((key, value) if is_object else value)
        token = _token(text, end)
        if token["mark"] == ",":
            token = _token(text, token.end())
        elif token["mark"] != closing and (is_object or token["mark"] not in ("{", "[")):
            raise _mistake(token)
    return container, token.end()


def _token(text: str, position: int) -> re.Match[str]:
    if (token := _TOKEN.match(text, position)) is None:
        raise _BrokenError(len(text))
    return token


def _mistake(token: re.Match[str]) -> _BrokenError:
    """A bracket that is a mistake here may begin a document of its own."""
    return _BrokenError(token.end() - (token["mark"] in ("{", "[")))


def _key(token: re.Match[str]) -> str:
    """Return a key: a string, or a word that is an identifier. Empty if it cannot be one."""
    if (word := token["word"]) is not None:
        return word if word.replace("-", "_").isidentifier() else ""
    return _string(token["double"] or token["single"] or "")


def _value(text: str, token: re.Match[str], depth: int) -> tuple[Any, int]:
    """Return the value that begins with `token`, and its end. Raises `_BrokenError`."""
    if token["mark"] in ("{", "[") and depth < _MAX_DEPTH:
        return _container(text, token.end() - 1, depth + 1)
    if token["mark"]:
        raise _mistake(token)
    if (word := token["word"]) is None:
        return _string(token["double"] or token["single"] or ""), token.end()
    if (value := _scalar(word)) is _INVALID:
        raise _mistake(token)
    return value, token.end()


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
