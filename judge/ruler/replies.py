"""Reading a judge's reply, whatever its form; a score is never given to a trajectory it was not meant for.

Understood: JSON alone, in a code fence or within prose, as `{"scores": [...]}`, a list, an object by id, or one object a line;
lines of `id: score`, or an id and then a line with its score; ids with what is around them in the prompt (`trajectory abc123`,
`<abc123>`); scores as numbers, `"0.7"`, `"7/10"` or `"70%"`; scales of 1, 10 and 100, told by the largest score of the reply (one
that seems to mix scales is not read at all). Where a draft comes before the final scores, the final ones count: they are named
so, or they are the last that name every id. An id that is unknown is ignored; one that is given twice with different scores, or
without a number, counts as missing and is asked for again.

Every step takes time linear in the length of the reply.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from judge.ruler.lenient_json import Object, documents, fold

LONGEST = 1_000_000
"""Characters of a reply that are read."""
_THINKING = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.S | re.I)
_THOUGHT = "</think>"
_LABEL = r"(?:trajectory|attempt|agent|candidate|response|id)"
_LINE = re.compile(
    rf"(?:\d{{1,3}}[.)])?+[\s*\-#>|`\"'<\[]*+(?:{_LABEL}\b[\s:=#\"'`*<\[]*+)*+(?P<id>[a-z0-9]++)[\s\"'`*>\]]*+"
    r"(?:[:=|]|->|→|-|–|(?=(?:final[\s_-]?)?score))[\s\"'`*:|]*+(?:(?:final[\s_-]?)?score[\s\"'`*:=]*+)?+"
    r"(?P<score>[-+]?\d++(?:\.\d++)?+(?:\s*+/\s*+\d++(?:\.\d++)?+|\s*+%)?+)(?!\w|[-.:/]\d)[ \t*`\"'|,;:.)\-–—]*+(?P<why>.*)",
    re.I,
)
_HEADING = re.compile(
    rf"[\s*\-#>|`\"'<\[\d.)]*+(?:{_LABEL}\b[\s:=#\"'`*<\[]*+)*+(?P<id>[a-z]++\d++)[\s\"'`*>\]:,]*+", re.I
)
_SCORE_LINE = re.compile(
    r"[\s*\-#>|`\"']*+(?P<final>final[\s_-]?)?(?:score|rating|grade)[\s\"'`*:=]*+"
    r"(?P<score>[-+]?\d++(?:\.\d++)?+(?:\s*+/\s*+\d++(?:\.\d++)?+|\s*+%)?+)(?!\w|[-.:/]\d)[\s*`\"',;.]*+",
    re.I,
)
_NUMBER = re.compile(
    r"\s*+([-+]?\d++(?:\.\d++)?+(?:e[-+]?\d++)?+)\s*+(?:/\s*+(\d++(?:\.\d++)?+)|(%))?+\s*+", re.I
)
_NAME = re.compile(rf"[\W_]*+(?:{_LABEL}[\W_]++)*+([a-z0-9]++)[\W_]*+", re.I)
_BETWEEN = re.compile(r"[\s,;|=*`:\-]*+")
"""What may stand between documents, or lines, that belong together."""
_FINAL_WORD = re.compile(r"\b(?:final|revised|corrected|adjusted)\b", re.I)
_ID_KEYS = ("id", "trajectory_id", "attempt_id", "trajectory", "attempt", "name")
_FINAL = ("final", "revised", "corrected", "adjusted")
_DRAFT = ("draft", "initial", "preliminary", "tentative", "provisional", "rough", "first")
_PLAIN_KEYS = ("score", "rating", "grade", "value", "reward")
_SCORE_KEYS = (
    tuple(f"{first}_{plain}" for first in _FINAL for plain in _PLAIN_KEYS) + _FINAL,
    _PLAIN_KEYS,
    ("overall_score", "overall", "total_score"),
)
"""The first of these that an entry has is its score."""
_WHY_KEYS = ("explanation", "reason", "reasoning", "rationale", "comment", "justification")
_MAX_DEPTH = 6
_LONGEST_LINE = 2_000
_LONGEST_NUMBER = 64
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


@dataclass(frozen=True)
class _Said:
    """Scores that belong together, and where they stood."""

    start: int
    end: int
    pairs: tuple[_Pair, ...]


Known = Mapping[str, str]
"""Ids asked for, by themselves in lower case."""


def read(reply: str, ids: Collection[str]) -> Read:
    """The scores in `reply` for `ids`. Never raises: what can't be read is missing."""
    text = _answer(reply)[:LONGEST]
    known = {i.lower(): i for i in ids}
    found = list(documents(text))
    said = [_Said(d.start, d.end, pairs) for d in found if (pairs := tuple(_pairs(d.value, known, 0)))]
    lines = list(_lines(text, known, [(d.start, d.end) for d in found]))
    if said and (after := _final_lines(text, lines, said[-1].end, known)):
        said = after
    return _read(_chosen(text, said or lines, known), known, ids)


def _answer(reply: str) -> str:
    """The reply without the thinking before it; a server may have left out the tag with which that begins."""
    text = _THINKING.sub("", reply)
    if text.lstrip()[:1] not in ("{", "["):
        _, _, text = text.rpartition(_THOUGHT)
    return text


def _read(pairs: Sequence[_Pair], known: Known, ids: Collection[str]) -> Read:
    bare = [p.value for p in pairs if not p.absolute]
    scale = _scale(max(bare, default=0.0))
    if scale > 1 and any(0 < v < 1 for v in bare):
        pairs = []  # two scales in one reply: no telling which number means what
    scores: dict[str, float] = {}
    explanations: dict[str, str] = {}
    contradicted: set[str] = set()
    for pair in pairs:
        value = pair.value if pair.absolute else pair.value / scale
        value = min(max(value, 0.0), 1.0)
        if pair.id in scores and not math.isclose(scores[pair.id], value, abs_tol=1e-9):
            contradicted.add(pair.id)
        scores[pair.id] = value
        explanations[pair.id] = pair.explanation[:2000]
    for name in contradicted:
        del scores[name], explanations[name]
    return Read(scores, explanations, scale, tuple(i for i in ids if i not in scores))


def _scale(largest: float) -> float:
    if largest <= _OVERSHOOT:
        return 1.0
    return 10.0 if largest <= 10.0 else 100.0


# -- which of several statements counts ----------------------------------------------------------------------------


def _chosen(text: str, said: Sequence[_Said], known: Known) -> list[_Pair]:
    """The last statement that names every id, and what comes after it; all of them where none does.

    A statement is a document, or documents (or lines) with nothing but punctuation between them. What is said twice and
    differently in what is chosen contradicts itself, so it counts for nothing."""
    whole = [s for s in [*_blocks(text, said), *said] if len({p.id for p in s.pairs}) == len(known)]
    # Of those that end together, the one that began last: a document beside its own draft.
    last = max(whole, key=lambda s: (s.end, s.start), default=None)
    if last is None:
        return [p for s in said for p in s.pairs]
    return [*last.pairs, *(p for s in said if s.start >= last.end for p in s.pairs)]


def _blocks(text: str, said: Sequence[_Said]) -> Iterator[_Said]:
    """Neighbours that belong together, as one."""
    block: list[_Said] = []
    for one in said:
        gap = _BETWEEN.match(text, block[-1].end, one.start) if block else None
        if block and (gap is None or gap.end() < one.start):
            yield _Said(block[0].start, block[-1].end, tuple(p for b in block for p in b.pairs))
            block = []
        block.append(one)
    if block:
        yield _Said(block[0].start, block[-1].end, tuple(p for b in block for p in b.pairs))


def _final_lines(text: str, lines: Sequence[_Said], after: int, known: Known) -> list[_Said]:
    """Lines that come after the last document, are called final and name every id; else they are remarks on it."""
    later = [line for line in lines if line.start >= after]
    if not later or _FINAL_WORD.search(text, after, later[-1].end) is None:
        return []
    return later if len({p.id for line in later for p in line.pairs}) == len(known) else []


# -- lines ---------------------------------------------------------------------------------------------------------


def _lines(text: str, known: Known, spans: Sequence[tuple[int, int]]) -> Iterator[_Said]:
    """Scores in lines outside the documents (`spans`)."""
    position = 0
    heading, began = "", 0
    inside = iter([*spans, (len(text) + 1, len(text) + 1)])
    start, end = next(inside)
    for line in text.splitlines(keepends=True):
        at, position = position, position + len(line)
        while end <= at:
            start, end = next(inside)
        if start < position and at < end:
            continue
        if not (head := line.rstrip()[:_LONGEST_LINE]):
            continue
        if (match := _LINE.match(head)) and (name := _known(match["id"], known)) is not None:
            if (number := _number(match["score"])) is not None:
                yield _Said(at, at + len(head), (_Pair(name, *number, match["why"].strip()),))
            heading = ""
        elif match := _HEADING.fullmatch(head):
            heading, began = _known(match["id"], known) or "", at
        elif heading and (match := _SCORE_LINE.fullmatch(head)) and (number := _number(match["score"])):
            yield _Said(began, at + len(head), (_Pair(heading, *number, ""),))


# -- documents -----------------------------------------------------------------------------------------------------


def _pairs(value: Any, known: Known, depth: int) -> Iterator[_Pair]:
    """Scores of known ids in a document."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(value, Object):
        if value.one(_ID_KEYS) is not None and _rated(value):
            name, number = _entry_id(value, known), _score(value)
            if name is not None and number is not None:
                yield _Pair(name, *number, _explanation(value))
            return
        final = [v for k, v in value if _begins(k, _FINAL) and isinstance(v, list)]
        said = [p for inner in final for p in _pairs(inner, known, depth + 1)]
        if said:
            yield from said
            return
        for key, inner in value:
            if _begins(key, _FINAL + _DRAFT) and isinstance(inner, list):
                continue
            name = _known(key, known)
            if isinstance(inner, Object) and inner.one(_ID_KEYS) is None and _rated(inner):
                if name is not None and (number := _score(inner)) is not None:
                    yield _Pair(name, *number, _explanation(inner))
            elif isinstance(inner, list):
                yield from _pairs(inner, known, depth + 1)
            elif name is not None and (number := _number(inner)) is not None:
                yield _Pair(name, *number, "")
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, list):
                yield from _pairs(inner, known, depth + 1)


def _begins(key: str, words: tuple[str, ...]) -> bool:
    return fold(key).startswith(words)


def _entry_id(entry: Object, known: Known) -> str | None:
    """Whom an entry is about: what its first kind of id says. None where it is no one asked for, or where another kind names
    someone else."""
    keys = [fold(k) for k, _ in entry]
    if any(keys.count(key) > 1 for key in _ID_KEYS):
        return None
    name = _known(entry.one(_ID_KEYS), known)
    others = {_known(entry.one((key,)), known) for key in _ID_KEYS if key in keys}
    return name if others <= {name, None} else None


def _known(name: Any, known: Known) -> str | None:
    """The id that `name` stands for, with what it may be dressed in taken off."""
    if not isinstance(name, str | int | float) or isinstance(name, bool):
        return None
    text = str(name).strip().lower()
    if text in known:
        return known[text]
    match = _NAME.fullmatch(text) if len(text) <= 100 else None
    return known.get(match.group(1)) if match is not None else None


def _rated(entry: Object) -> bool:
    return any(entry.one(keys) is not None for keys in _SCORE_KEYS)


def _score(entry: Object) -> tuple[float, bool] | None:
    """The entry's score; None where it gives several of one kind, or no number."""
    keys = next(keys for keys in _SCORE_KEYS if entry.one(keys) is not None)
    return None if entry.several(keys) else _number(entry.one(keys))


def _explanation(value: Object) -> str:
    found = value.one(_WHY_KEYS)
    return found if isinstance(found, str) else ""


def _number(value: Any) -> tuple[float, bool] | None:
    """The number, and whether it is of 0..1 already; None where it is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value) if len(value) <= _LONGEST_NUMBER else None
        if match is None:
            return None
        number, of, percent = float(match.group(1)), match.group(2), match.group(3)
        if not math.isfinite(number):
            return None
        if of is not None:
            return (number / float(of), True) if float(of) > 0 else None
        return (number / 100, True) if percent else (number, False)
    if isinstance(value, int | float):
        return (float(value), False) if math.isfinite(value) else None
    return None
