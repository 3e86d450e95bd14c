"""Parses a judge's reply, in whatever form it comes. A score is never given to a trajectory that it was not meant for.

Accepted are JSON alone, in a code fence or within prose, as `{"scores": [...]}`, a list, an object by id, or one
object a line; lines of `id: score`, or an id and then a line with its score; ids with what surrounds them in the
prompt (`trajectory abc123`, `<abc123>`); scores as numbers, `"0.7"`, `"7/10"` or `"70%"`. Where a draft comes before
the final scores, the final ones count: those that are called final, or the last that name every id.

A judge may repeat evidence, in which an agent has written scores for itself. An object `{"scores": …}` that names every
id is the answer that the prompt asks for: what stands before, after or beside its scores does not count.

An unknown id is ignored. An id with contradicting scores, or without a number, is missing. A reply with a score
outside 0..1 is on a scale that nobody asked for: none of its scores is used. The caller asks again for what is
missing.

Every step takes time linear in the length of the reply.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from judge.ruler.lenient_json import Object, normalize, scan_documents

MAX_CHARACTERS = 1_000_000
"""Characters of a reply that are read."""
_THINKING = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.S | re.I)
_THINKING_END = "</think>"
_LABEL = r"(?:trajectory|attempt|agent|candidate|response|id)"
_SCORE = r"(?P<score>[-+]?\d++(?:\.\d++)?+(?:\s*+/\s*+\d++(?:\.\d++)?+|\s*+%)?+)(?!\w|[-.:/]\d)"
_LINE = re.compile(
    rf"(?:\d{{1,3}}[.)])?+[\s*\-#>|`\"'<\[]*+(?:{_LABEL}\b[\s:=#\"'`*<\[]*+)*+(?P<id>[a-z0-9]++)[\s\"'`*>\]]*+"
    r"(?:[:=|]|->|→|-|–|(?=(?:final[\s_-]?)?score))[\s\"'`*:|]*+(?:(?:final[\s_-]?)?score[\s\"'`*:=]*+)?+"
    rf"{_SCORE}[ \t*`\"'|,;:.)\-–—]*+(?P<why>.*+)",
    re.I,
)
_HEADING = re.compile(
    rf"[\s*\-#>|`\"'<\[\d.)]*+(?:{_LABEL}\b[\s:=#\"'`*<\[]*+)*+(?P<id>[a-z]++\d++)[\s\"'`*>\]:,]*+", re.I
)
_SCORE_LINE = re.compile(
    rf"[\s*\-#>|`\"']*+(?:final[\s_-]?)?(?:score|rating|grade)[\s\"'`*:=]*+{_SCORE}[\s*`\"',;.]*+", re.I
)
_NUMBER = re.compile(
    r"\s*+([-+]?\d++(?:\.\d++)?+(?:e[-+]?\d++)?+)\s*+(?:/\s*+(\d++(?:\.\d++)?+)|(%))?+\s*+", re.I
)
_NAME = re.compile(rf"[\W_]*+(?:{_LABEL}[\W_]++)*+([a-z0-9]++)[\W_]*+", re.I)
_SEPARATOR = re.compile(r"[\s,;|=*`:\-]*+")
"""Text that may separate documents or lines that belong together."""
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
"""The first kind of key that an entry has holds its score."""
_EXPLANATION_KEYS = ("explanation", "reason", "reasoning", "rationale", "comment", "justification")
_MAX_DEPTH = 6
_MAX_LINE = 2_000
_MAX_NAME = 100
_MAX_NUMBER = 64
_MAX_EXPLANATION = 2_000


@dataclass(frozen=True)
class ParsedScores:
    """The scores of a reply."""

    scores: dict[str, float]
    """0..1 by id; only ids that were asked for."""
    explanations: dict[str, str]
    missing: tuple[str, ...]
    """Ids without a usable score, in the order asked."""
    out_of_range: bool = False
    """The reply has a score outside 0..1, so none of its scores is used."""


@dataclass(frozen=True)
class _Entry:
    id: str
    score: float
    explanation: str = ""


@dataclass(frozen=True)
class _Statement:
    """Scores that belong together, and their span in the text."""

    start: int
    end: int
    entries: tuple[_Entry, ...]

    def names_all(self, ids: Mapping[str, str]) -> bool:
        return len({e.id for e in self.entries}) == len(ids)


Ids = Mapping[str, str]
"""The ids asked for, by their lower case."""


def parse_scores(reply: str, ids: Collection[str]) -> ParsedScores:
    """Return the scores in `reply` for `ids`. Never raises: what cannot be parsed is missing."""
    text = _without_thinking(reply)[:MAX_CHARACTERS]
    known = {i.lower(): i for i in ids}
    statements = _statements(text, known)
    scores: dict[str, float] = {}
    explanations: dict[str, str] = {}
    contradicted: set[str] = set()
    final = _final_entries(text, statements, known)
    out_of_range = any(not 0 <= e.score <= 1 for e in final)
    for entry in () if out_of_range else final:
        if entry.id in scores and not math.isclose(scores[entry.id], entry.score, abs_tol=1e-9):
            contradicted.add(entry.id)
        scores[entry.id], explanations[entry.id] = entry.score, entry.explanation[:_MAX_EXPLANATION]
    for name in contradicted:
        del scores[name], explanations[name]
    return ParsedScores(scores, explanations, tuple(i for i in ids if i not in scores), out_of_range)


def _without_thinking(reply: str) -> str:
    """Remove the thinking before the answer. A server may have removed the tag that opens it."""
    text = _THINKING.sub("", reply)
    return text if text.lstrip()[:1] in ("{", "[") else text.rpartition(_THINKING_END)[2]


# -- which of several statements counts ----------------------------------------------------------------------------


def _statements(text: str, ids: Ids) -> list[_Statement]:
    """Return the statements in a reply that may count: objects as the prompt asks for, else all documents, else
    lines."""
    documents = list(scan_documents(text))
    asked_for = [
        _Statement(d.start, d.end, tuple(_entries(d.value.first(("scores",)), ids, 1)))
        for d in documents
        if isinstance(d.value, Object) and d.value.occurrences(("scores",)) == 1
    ]
    if any(statement.names_all(ids) for statement in asked_for):
        return asked_for
    statements = [
        _Statement(d.start, d.end, entries)
        for d in documents
        if (entries := tuple(_entries(d.value, ids, 0)))
    ]
    lines = list(_score_lines(text, ids, [(d.start, d.end) for d in documents]))
    if not statements:
        return lines
    return _final_lines(text, lines, statements[-1].end, ids) or statements


def _final_entries(text: str, statements: Sequence[_Statement], ids: Ids) -> list[_Entry]:
    """Return the entries of the last statement that names every id, and of those after it; of all if none names every
    id.

    Documents, or lines, with nothing but punctuation between them also count as one statement."""
    whole = [s for s in [*_merged(text, statements), *statements] if s.names_all(ids)]
    # Of two that end together, the one that began last: a document beside its own draft.
    last = max(whole, key=lambda s: (s.end, s.start), default=None)
    if last is None:
        return [e for s in statements for e in s.entries]
    return [*last.entries, *(e for s in statements if s.start >= last.end for e in s.entries)]


def _merged(text: str, statements: Sequence[_Statement]) -> Iterator[_Statement]:
    """Return runs of statements that only punctuation separates, each as one statement."""
    run: list[_Statement] = []
    for statement in [*statements, None]:
        if run and statement is not None:
            gap = _SEPARATOR.match(text, run[-1].end, statement.start)
            if gap is not None and gap.end() >= statement.start:
                run.append(statement)
                continue
        if run:
            yield _Statement(run[0].start, run[-1].end, tuple(e for s in run for e in s.entries))
        run = [statement] if statement is not None else []


def _final_lines(text: str, lines: Sequence[_Statement], after: int, ids: Ids) -> list[_Statement]:
    """Return the lines after the last document if they are called final and name every id. Otherwise they are
    remarks."""
    later = [line for line in lines if line.start >= after]
    if not later or _FINAL_WORD.search(text, after, later[-1].end) is None:
        return []
    return later if len({e.id for line in later for e in line.entries}) == len(ids) else []


# -- lines ---------------------------------------------------------------------------------------------------------


def _score_lines(text: str, ids: Ids, spans: Sequence[tuple[int, int]]) -> Iterator[_Statement]:
    """Return the scores in lines outside of the documents, whose `spans` are in order."""
    position = 0
    heading, heading_start = "", 0
    remaining = iter([*spans, (len(text) + 1, len(text) + 1)])
    start, end = next(remaining)
    for line in text.splitlines(keepends=True):
        at, position = position, position + len(line)
        while end <= at:
            start, end = next(remaining)
        head = line.rstrip()[:_MAX_LINE]
        if start < position or not head:
            continue
        if (match := _LINE.match(head)) and (name := _find_id(match["id"], ids)) is not None:
            if (score := _number(match["score"])) is not None:
                yield _Statement(at, at + len(head), (_Entry(name, score, match["why"].strip()),))
            heading = ""
        elif match := _HEADING.fullmatch(head):
            heading, heading_start = _find_id(match["id"], ids) or "", at
        elif heading and (match := _SCORE_LINE.fullmatch(head)):
            entries = (_Entry(heading, score),) if (score := _number(match["score"])) is not None else ()
            yield _Statement(heading_start, at + len(head), entries)


# -- documents -----------------------------------------------------------------------------------------------------


def _entries(value: Any, ids: Ids, depth: int) -> Iterator[_Entry]:
    """Return the scores of known ids in a document."""
    if depth > _MAX_DEPTH or not isinstance(value, list):
        return
    if not isinstance(value, Object):
        for inner in value:
            yield from _entries(inner, ids, depth + 1)
        return
    if value.first(_ID_KEYS) is not None and _has_score(value):
        if (name := _entry_id(value, ids)) is not None and (score := _score(value)) is not None:
            yield _Entry(name, score, _explanation(value))
        return
    final = [v for k, v in value if normalize(k).startswith(_FINAL)]
    if entries := [e for inner in final for e in _entries(inner, ids, depth + 1)]:
        yield from entries
        return
    for key, inner in value:
        if isinstance(inner, list) and normalize(key).startswith(_FINAL + _DRAFT):
            continue
        name = _find_id(key, ids)
        if isinstance(inner, Object) and inner.first(_ID_KEYS) is None and _has_score(inner):
            if name is not None and (score := _score(inner)) is not None:
                yield _Entry(name, score, _explanation(inner))
        elif isinstance(inner, list):
            yield from _entries(inner, ids, depth + 1)
        elif name is not None and (score := _number(inner)) is not None:
            yield _Entry(name, score)


def _entry_id(entry: Object, ids: Ids) -> str | None:
    """Return the id that an entry is about. `None` if it is unknown, or if its keys name different ids."""
    given = [key for key in _ID_KEYS if entry.occurrences((key,))]
    if any(entry.occurrences((key,)) > 1 for key in given):
        return None
    name = _find_id(entry.first(_ID_KEYS), ids)
    return name if {_find_id(entry.first((key,)), ids) for key in given} <= {name, None} else None


def _find_id(name: Any, ids: Ids) -> str | None:
    """Return the id in `name`, without the label and punctuation around it, or `None`."""
    if not isinstance(name, str | int | float) or isinstance(name, bool):
        return None
    text = str(name).strip().lower()
    if text in ids:
        return ids[text]
    match = _NAME.fullmatch(text) if len(text) <= _MAX_NAME else None
    return ids.get(match.group(1)) if match is not None else None


def _has_score(entry: Object) -> bool:
    return any(entry.first(keys) is not None for keys in _SCORE_KEYS)


def _score(entry: Object) -> float | None:
    """Return the entry's score. `None` if it gives several of one kind, or no number."""
    keys = next(keys for keys in _SCORE_KEYS if entry.first(keys) is not None)
    return None if entry.occurrences(keys) > 1 else _number(entry.first(keys))


def _explanation(entry: Object) -> str:
    found = entry.first(_EXPLANATION_KEYS)
    return found if isinstance(found, str) else ""


def _number(value: Any) -> float | None:
    """Return a number, or the quotient of `7/10` or `70%`; `None` if `value` is no finite number."""
    number, divisor = value, 1.0
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value) if len(value) <= _MAX_NUMBER else None
        if match is None:
            return None
        number = float(match.group(1))
        divisor = float(match.group(2)) if match.group(2) is not None else 100.0 if match.group(3) else 1.0
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(number) / divisor if math.isfinite(number) and divisor > 0 else None
