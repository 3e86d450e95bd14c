"""JSON documents in a model's reply, scanned once from left to right: linear time for any text.

Any text may stand between documents. Within a document these deviations are accepted, because their meaning is clear:
trailing commas, a missing comma between objects, single quotes, bare keys, line breaks in strings, `None` and `True`,
`7/10` and `70%` without quotes, `//` comments. Of a document that breaks off, only the complete entries are returned.
docs/decisions/judge.md compares this with libraries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_OPENING = re.compile(r"[{\[]")
# Quantifiers are possessive, so that a pattern never reads a character twice; a test holds this.
_TOKEN = re.compile(
    r"\s*+(?://[^\n]*+\s*+)*+(?:(?P<mark>[{}\[\],:])"
    r'|"(?P<double>(?:[^"\\]++|\\.)*+)(?P<closed>"?)'
    r"|'(?P<single>(?:[^'\\]++|\\.)*+)(?P<ended>'?)"
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
    """A JSON object that keeps duplicate keys."""

    def first(self, keys: tuple[str, ...]) -> Any:
        """Return the value of the first of `keys` that is present, in the order of `keys`, or `None`."""
        normalized = [(normalize(k), v) for k, v in self]
        return next((v for key in keys for k, v in normalized if k == key), None)

    def occurrences(self, keys: tuple[str, ...]) -> int:
        """Return how many entries have one of `keys`."""
        return sum(normalize(key) in keys for key, _ in self)


def normalize(key: str) -> str:
    """Return a key in lower case with underscores: `Final Score`, `final-score` and `final_score` are the same."""
    return re.sub(r"[\s_-]+", "_", key.strip()[:_MAX_WORD].lower())


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
    start: int
    expects: str
    """`key`, `colon`, `value` or `comma` in an object; `item` or `comma` in a list."""
    key: str = ""
    complete: list[Document] = field(default_factory=list)
    """Objects and lists directly within it that have ended."""

    @classmethod
    def begin(cls, bracket: str, start: int) -> _Frame:
        return cls(Object(), start, "key") if bracket == "{" else cls([], start, "item")

    @property
    def is_object(self) -> bool:
        return isinstance(self.value, Object)

    def append(self, value: Any) -> None:
        self.value.append((self.key, value) if self.is_object else value)
        self.expects = "comma"

    def accepts_container(self) -> bool:
        return self.expects in ("value", "item") or (self.expects == "comma" and not self.is_object)


def scan_documents(text: str) -> Iterator[Document]:
    """Return every outermost object and list in `text` in order; of a broken one, its complete entries."""
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        found, position = _document(text, opening.start())
        yield from found


def _document(text: str, start: int) -> tuple[list[Document], int]:
    """Scan the document that begins at `start`. Return what it holds, and where to go on."""
    stack = [_Frame.begin(text[start], start)]
    position = start + 1
    while (token := _TOKEN.match(text, position)) is not None:
        top, mark, position = stack[-1], token["mark"], token.end()
        match mark:
            case "{" | "[":
                if not top.accepts_container() or len(stack) >= _MAX_DEPTH:
                    return _complete_entries(stack), position - 1
                stack.append(_Frame.begin(mark, position - 1))
            case "}" | "]":
                if (mark == "}") != top.is_object or top.expects in ("colon", "value"):
                    return _complete_entries(stack), position
                ended = Document(stack.pop().value, top.start, position)
                if not stack:
                    return [ended], position
                stack[-1].append(ended.value)
                stack[-1].complete.append(ended)
            case "," if top.expects not in ("colon", "value"):
                top.expects = "key" if top.is_object else "item"
            case ":" if top.expects == "colon":
                top.expects = "value"
            case None if _take_scalar(top, token):
                pass
            case _:
                return _complete_entries(stack), position
    return _complete_entries(stack), len(text)


def _take_scalar(top: _Frame, token: re.Match[str]) -> bool:
    """Take a string, number or word as key or value. Return whether it is allowed there."""
    word = token["word"]
    if word is None and not (token["closed"] or token["ended"]):
        return False  # the text ends within the string
    string = _string(token["double"] if token["double"] is not None else token["single"] or "")
    if top.is_object and top.expects in ("key", "comma"):
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


def _complete_entries(stack: list[_Frame]) -> list[Document]:
    """Return the complete entries of a document that breaks off: those of its open lists and of the innermost open
    object.

    Entries of outer objects are left out, because a later key might have replaced them."""
    return [d for f in stack if f is stack[-1] or not f.is_object for d in f.complete]
