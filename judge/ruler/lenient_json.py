"""JSON out of a model's reply, read once from left to right: linear time whatever the text.

Between and around the documents anything may stand. Within them the usual slips are forgiven where their meaning is plain:
trailing commas, a comma that is missing between objects, single quotes, bare keys, line breaks in strings, Python's `None` and
`True`, `7/10` without quotes, `//` comments. Nothing is made up: of a document that breaks off, only entries that were
completed count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_OPENING = re.compile(r"[{\[]")
# Quantifiers are possessive: a token is matched in one pass or not at all.
_TOKEN = re.compile(
    r"\s*+(?://[^\n]*+\s*+)*+(?:(?P<mark>[{}\[\],:])"
    r'|"(?P<double>(?:[^"\\]++|\\.)*+)(?P<closed>"?)'
    r"|'(?P<single>(?:[^'\\]++|\\.)*+)(?P<ended>'?)"
    r"|(?P<word>[^\s{}\[\],:\"']++))",
    re.S,
)
_NUMBER = re.compile(r"[-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+")
_MEASURE = re.compile(r"[-+]?\d++(?:\.\d++)?+(?:/\d++(?:\.\d++)?+|%)")
_WORDS = {
    "true": True, "false": False, "null": None, "True": True, "False": False, "None": None,
    "NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf"),
}  # fmt: skip
_LONGEST_WORD = 64
_DEEPEST = 64


class Object(list[tuple[str, Any]]):
    """A JSON object with its duplicate keys."""

    def one(self, keys: tuple[str, ...]) -> Any:
        """The value of the first of `keys` that it has, in the order of `keys`; None where it has none of them."""
        folded = [(fold(k), v) for k, v in self]
        return next((v for key in keys for k, v in folded if k == key), None)

    def several(self, keys: tuple[str, ...]) -> bool:
        """Whether more than one of its keys is among `keys`."""
        return sum(fold(key) in keys for key, _ in self) > 1


def fold(key: str) -> str:
    """A key without what writers vary: `Final Score`, `final-score` and `final_score` are one."""
    return re.sub(r"[\s_-]+", "_", key.strip()[:_LONGEST_WORD].lower())


@dataclass(frozen=True)
class Document:
    """One outermost value, and where it stood."""

    value: Any
    start: int
    end: int


@dataclass
class _Open:
    container: list[Any]
    key: str = ""
    expects: str = ""
    starts: list[int] = field(default_factory=list)
    """Where each value that is an object or a list began; the rest of `container` has none."""
    held: list[tuple[Any, int, int]] = field(default_factory=list)
    """Containers that were completed in it, with start and end."""
    began: int = 0

    def put(self, value: Any) -> None:
        if isinstance(self.container, Object):
            self.container.append((self.key, value))
        else:
            self.container.append(value)
        self.expects = "comma"


def documents(text: str) -> Iterator[Document]:
    """Every outermost object and list in `text`, in order; of a broken one the entries that are complete."""
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        found, position = _document(text, opening.start())
        yield from found


def _document(text: str, start: int) -> tuple[list[Document], int]:
    """What the bracket at `start` begins, and where to go on."""
    stack = [_open(text[start], start)]
    position = start + 1
    while (token := _TOKEN.match(text, position)) is not None:
        top, mark, position = stack[-1], token["mark"], token.end()
        begins = position - 1
        if mark in ("{", "["):
            fits = top.expects in ("value", "item") or (
                top.expects == "comma" and not isinstance(top.container, Object)
            )
            if not fits or len(stack) >= _DEEPEST:
                return _complete(stack), begins
            stack.append(_open(mark, begins))
        elif mark in ("}", "]"):
            closes = "}" if isinstance(top.container, Object) else "]"
            if mark != closes or top.expects in ("colon", "value"):
                return _complete(stack), position
            stack.pop()
            if not stack:
                return [Document(top.container, start, position)], position
            stack[-1].put(top.container)
            stack[-1].held.append((top.container, top.began, position))
        elif mark == ",":
            if top.expects in ("colon", "value"):
                return _complete(stack), position
            top.expects = "key" if isinstance(top.container, Object) else "item"
        elif mark == ":":
            if top.expects != "colon":
                return _complete(stack), position
            top.expects = "value"
        elif not _scalar(top, token):
            return _complete(stack), position
    return _complete(stack), len(text)


def _open(bracket: str, start: int) -> _Open:
    return (
        _Open(Object(), expects="key", began=start)
        if bracket == "{"
        else _Open([], expects="item", began=start)
    )


def _scalar(top: _Open, token: re.Match[str]) -> bool:
    """Take in a string, number or word; whether it fits."""
    word = token["word"]
    if word is None:
        if not (token["closed"] or token["ended"]):
            return False  # the text ends in it
        value: Any = _string(token["double"] if token["double"] is not None else token["single"])
    if top.expects in ("key", "comma") and isinstance(top.container, Object):
        if word is not None and not word.replace("-", "_").isidentifier():
            return False
        top.key, top.expects = (word if word is not None else value), "colon"
        return True
    if top.expects not in ("value", "item"):
        return False
    if word is not None:
        known, value = _word(word)
        if not known:
            return False
    top.put(value)
    return True


def _string(raw: str) -> str:
    if "\\" not in raw:
        return raw
    try:
        return str(json.loads(f'"{raw}"', strict=False))
    except ValueError:  # an escape that JSON does not know, or a bare quote
        return raw.replace("\\n", "\n").replace('\\"', '"').replace("\\'", "'")


def _word(word: str) -> tuple[bool, Any]:
    """Whether the word is a value, and which."""
    if word in _WORDS:
        return True, _WORDS[word]
    if _NUMBER.fullmatch(word):
        return True, float(word) if len(word) <= _LONGEST_WORD else None
    if _MEASURE.fullmatch(word):
        return True, word if len(word) <= _LONGEST_WORD else None
    return False, None


def _complete(stack: list[_Open]) -> list[Document]:
    """Of a document that breaks off: what its open lists hold, and what the innermost open object does.

    The entries of an outer object are left out, because what it went on to say may have replaced them."""
    out = []
    for place, frame in enumerate(stack):
        if not isinstance(frame.container, Object) or place == len(stack) - 1:
            out += [Document(*held) for held in frame.held]
    return out
