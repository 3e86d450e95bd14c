"""Reading a judge's reply, whatever its form; a score is never given to a trajectory it was not meant for.

Understood: JSON alone, in a code fence or within prose, as `{"scores": [...]}`, a list, or an object by id; lines of
`id: score`; scores as numbers, `"0.7"`, `"7/10"` or `"70%"`; scales of 1, 10 and 100, told by the largest score of the
reply (one that seems to mix scales is not read at all). An id that is unknown is ignored; one that is given twice with different scores, or without a number, counts as
missing and is asked for again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

_THINKING = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.S | re.I)
_LINE = re.compile(
    r"^[\s*\-#>|`\"']*(?:trajectory|attempt|id)?[\s:=#\"'`*]*([a-z]{3}\d{3})[\s\"'`*]*(?:[:=|]|->|-|score)[\s\"'`*:|]*"
    r"(?:score[\s:=]*)?([-+]?\d+(?:\.\d+)?(?:\s*/\s*\d+(?:\.\d+)?|\s*%)?)(?!\w|[-.:/]\d)[ \t*`\"'|,;:.)\-–—]*(.*)$",
    re.I | re.M,
)
_NUMBER = re.compile(r"^\s*([-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?)\s*(?:/\s*(\d+(?:\.\d+)?)|(%))?\s*$", re.I)
_ID_KEYS = ("id", "trajectory_id", "trajectory", "attempt", "name")
_SCORE_KEYS = ("score", "rating", "grade", "value", "reward")
_WHY_KEYS = ("explanation", "reason", "reasoning", "rationale", "comment", "justification")
_MAX_DEPTH = 6
_OVERSHOOT = 1.5
"""A largest score up to this is a 0..1 scale overdone, above it another scale."""


@dataclass(frozen=True)
class Read:
    """What a reply said."""

    scores: dict[str, float]
    """0..1 by id; only ids that were asked for."""
    explanations: dict[str, str]
    scale: float
    """What the numbers had to be divided by."""
    missing: tuple[str, ...]
    """Ids asked for without a score that can be used, in the order asked."""


@dataclass(frozen=True)
class _Pair:
    id: str
    value: float
    absolute: bool
    """The number is of 0..1 already: it came as `7/10` or `70%`."""
    explanation: str


def read(reply: str, ids: Collection[str]) -> Read:
    """The scores in `reply` for `ids`. Never raises: what can't be read is missing."""
    text = _THINKING.sub("", reply)[:1_000_000]
    known = {i.lower(): i for i in ids}
    pairs: list[_Pair] = []
    for document in documents(text):
        if found := [p for p in _pairs(document, 0) if p.id.strip().lower() in known]:
            pairs = found  # a later document is the judge's last word
    if not pairs:
        pairs = [
            _Pair(m.group(1), *number, m.group(3).strip())
            for m in _LINE.finditer(text)
            if (number := _number(m.group(2)))
        ]
        pairs = [p for p in pairs if p.id.lower() in known]
    bare = [p.value for p in pairs if not p.absolute]
    scale = _scale(max(bare, default=0.0))
    if scale > 1 and any(0 < v < 1 for v in bare):
        pairs = []  # two scales in one reply: no telling which number means what
    scores: dict[str, float] = {}
    explanations: dict[str, str] = {}
    contradicted: set[str] = set()
    for pair in pairs:
        name = known[pair.id.strip().lower()]
        value = pair.value if pair.absolute else pair.value / scale
        value = min(max(value, 0.0), 1.0)
        if name in scores and not math.isclose(scores[name], value, abs_tol=1e-9):
            contradicted.add(name)
        scores[name] = value
        explanations[name] = pair.explanation[:2000]
    for name in contradicted:
        del scores[name], explanations[name]
    return Read(scores, explanations, scale, tuple(i for i in ids if i not in scores))


def _scale(largest: float) -> float:
    if largest <= _OVERSHOOT:
        return 1.0
    return 10.0 if largest <= 10.0 else 100.0


def documents(text: str) -> Iterator[Any]:
    """Every outermost JSON value in `text`, in order."""
    decoder = json.JSONDecoder(object_pairs_hook=_Object)
    position = 0
    failures = 0
    while (start := _next_bracket(text, position)) >= 0 and failures < 200:
        value, end = _decode(decoder, text, start)
        if end > start:
            yield value
            position = end
        else:
            failures += 1
            position = start + 1


class _Object(list[tuple[str, Any]]):
    """A JSON object with its duplicate keys."""

    def one(self, keys: tuple[str, ...]) -> Any:
        for key, value in self:
            if key.lower() in keys:
                return value
        return None

    def several(self, keys: tuple[str, ...]) -> bool:
        return sum(key.lower() in keys for key, _ in self) > 1


def _next_bracket(text: str, position: int) -> int:
    found = [i for i in (text.find("{", position), text.find("[", position)) if i >= 0]
    return min(found, default=-1)


def _decode(decoder: json.JSONDecoder, text: str, start: int) -> tuple[Any, int]:
    """A value and where it ends; (none, start) where none can be read. Trailing commas are forgiven."""
    try:
        return decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        pass
    mended = re.sub(r",(\s*[}\]])", r"\1", text[start : start + 200_000])
    if mended == text[start : start + 200_000]:
        return None, start
    try:
        value, end = decoder.raw_decode(mended)
    except (ValueError, RecursionError):
        return None, start
    return value, start + end + (len(text[start : start + 200_000]) - len(mended))


def _pairs(value: Any, depth: int) -> Iterator[_Pair]:
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, _Object):
        name, score = value.one(_ID_KEYS), value.one(_SCORE_KEYS)
        if isinstance(name, str | int) and not isinstance(name, bool) and score is not None:
            number = _number(score)
            if number is not None and not value.several(_SCORE_KEYS) and not value.several(_ID_KEYS):
                yield _Pair(str(name), *number, _explanation(value))
            return
        for key, inner in value:
            if (
                isinstance(inner, _Object)
                and inner.one(_ID_KEYS) is None
                and inner.one(_SCORE_KEYS) is not None
            ):
                if (number := _number(inner.one(_SCORE_KEYS))) is not None and not inner.several(_SCORE_KEYS):
                    yield _Pair(key, *number, _explanation(inner))
            elif isinstance(inner, list):
                yield from _pairs(inner, depth + 1)
            elif (number := _number(inner)) is not None:
                yield _Pair(key, *number, "")
    elif isinstance(value, list):
        for inner in value:
            yield from _pairs(inner, depth + 1)


def _explanation(value: _Object) -> str:
    found = value.one(_WHY_KEYS)
    return found if isinstance(found, str) else ""


def _number(value: Any) -> tuple[float, bool] | None:
    """The number, and whether it is of 0..1 already; none where it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        match = _NUMBER.match(value)
        if match is None:
            return None
        number, of, percent = float(match.group(1)), match.group(2), match.group(3)
        if not math.isfinite(number):
            return None
        if of is not None:
            return (number / float(of), True) if float(of) > 0 else None
        return (number / 100, True) if percent else (number, False)
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            return None
        return (number, False) if math.isfinite(number) else None
    return None
