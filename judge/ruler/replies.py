"""Parses a judge's reply: the score that the judge gave each trajectory, or nothing.

Accepted are JSON alone, in a code fence or within prose, as `{"scores": [...]}`, a list, an object by id, or one
object a line; lines of `id: score`, or an id and then a line with its score; ids with what surrounds them in the
prompt (`trajectory abc123`, `<abc123>`); scores as numbers, `"0.7"`, `"7/10"` or `"70%"`.

A judge may quote the trajectories, and an agent may have written scores for itself there. The ids are drawn for the
call, so no trajectory holds one. But where a judge quotes without escaping or marking it, the quoted text can end or
continue the entry that it stands in. It cannot take away the score that the judge wrote. Therefore a reply is read only
if every id has one score and no score is left over:

- In JSON every number is the score of an id, each entry has one, and after the first entry no bracket stands outside of
  a document. What breaks a document makes the whole of it unreadable.
- In prose, every number from 0 to 1 between an id and the next one is that id's score. A line with a score but no id
  that a trajectory contains literally is taken for a quotation.
- Two statements about an id agree. Text between `<think>` and `</think>` before the answer is skipped.

Every step takes time linear in the length of the reply.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

MAX_CHARACTERS = 1_000_000
"""Characters of a reply that are read."""
_THINKING = re.compile(r"\s*+<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.S | re.I)
_THINKING_END = "</think>"
_LABEL = r"(?:trajectory|attempt|agent|candidate|response|id)"
_MARKUP = r"[\s\"'`*>\]]*+"
_DIGITS = r"[-+]?(?:\d++(?:\.\d++)?+|\.\d++)(?:e[-+]?\d++)?+(?:/\d++(?:\.\d++)?+|%)?+"
_SCORE = rf"(?P<score>{_DIGITS})(?![\w%/]|[-.,:]\d)"
_BEGINNING = rf"[\s*\-#>|`\"'<\[]*+(?:{_LABEL}\b[\s:=#\"'`*<\[]*+)*+"
_LINE = re.compile(
    rf"(?:\d{{1,3}}[.)])?+{_BEGINNING}(?P<id>[a-z0-9]++){_MARKUP}"
    rf"(?:[:=|]|->|→|-|–|(?=(?:final[\s_-]?)?score))[\s*`:|]*+(?:(?:final[\s_-]?)?score[\s*`:=]*+)?+"
    rf"{_SCORE}[ \t*`]*+(?:[|,;:.()\-–—]|\Z)(?P<why>.*+)",
    re.I,
)
_HEADING = re.compile(rf"(?:\d{{1,3}}[.)])?+{_BEGINNING}(?P<id>[a-z]++\d++)[\s\"'`*>\]:,]*+", re.I)
_SCORE_LINE = re.compile(
    rf"[\s*\-#|`]*+(?:final[\s_-]?)?(?:score|rating|grade)[\s`*:=]*+{_SCORE}[\s*`;,.|]*+", re.I
)
_ANY_NUMBER = re.compile(rf"(?<![\w.]){_DIGITS}", re.I)
_NUMBER = re.compile(
    r"\s*+([-+]?(?:\d++(?:\.\d++)?+|\.\d++)(?:e[-+]?\d++)?+)\s*+(?:/\s*+(\d++(?:\.\d++)?+)|(%))?+\s*+", re.I
)
_NAME = re.compile(rf"[\W_]*+(?:{_LABEL}[\W_]++)*+([a-z0-9]++)[\W_]*+", re.I)
_BRACKET = re.compile(r"[][{}]")
_OPENING = re.compile(r"[{\[]")
_NOT_A_WORD = re.compile(r"[^\w.%/]++")
_ID_KEYS = ("id", "trajectory_id", "attempt_id", "trajectory", "attempt", "name")
_SCORES = ("score", "rating", "grade", "value", "reward")
_SCORE_KEYS = (*_SCORES, *(f"{kind}_{key}" for kind in ("final", "overall", "total") for key in _SCORES))
_EXPLANATION_KEYS = ("explanation", "reason", "reasoning", "rationale", "comment", "justification")
_MAX_LINE = 2_000
_MAX_NAME = 100
_MAX_NUMBER = 64
_MAX_EXPLANATION = 2_000


class Object(list[tuple[str, Any]]):
    """A JSON object as a list of its members, so that duplicate keys are kept."""


class Document(NamedTuple):
    """One outermost JSON object or list, and its span in the text."""

    value: Any
    start: int
    end: int


_JSON = json.JSONDecoder(object_pairs_hook=Object, parse_int=float, strict=False)


class UnreadableReplyError(Exception):
    """A reply gives no scores beyond doubt; the message says why. `kind` is as `JudgeMeasured.failure`."""

    def __init__(self, why: str, kind: Literal["unreadable", "out_of_range"] = "unreadable") -> None:
        super().__init__(why)
        self.kind = kind


@dataclass(frozen=True)
class ParsedScores:
    """The scores of a reply, for all ids that were asked for."""

    scores: dict[str, float]
    """0..1 by id."""
    explanations: dict[str, str]


@dataclass(frozen=True)
class _Statement:
    """A number in a reply, and the id that it is given to (`None`: to no known one)."""

    id: str | None
    score: float
    explanation: str = ""


Ids = Mapping[str, str]
"""The ids asked for, by their lower case."""


def parse_scores(reply: str, ids: Collection[str], evidence: str = "") -> ParsedScores:
    """Return the scores in `reply` for `ids`. `evidence` is the text of the trajectories, which the judge may quote.

    Raises `UnreadableReplyError` unless the reply gives each id one score."""
    text = _without_thinking(reply[:MAX_CHARACTERS])
    known = {i.lower(): i for i in ids}
    try:
        statements = _in_documents(text, known) or _in_prose(text, known, evidence)
    except RecursionError as error:
        raise UnreadableReplyError("its JSON is nested too deeply") from error
    found: dict[str, _Statement] = {}
    for statement in statements:
        if statement.id is None:
            raise UnreadableReplyError(f"the number {statement.score:g} is given to no attempt")
        if not 0 <= statement.score <= 1:
            why = f"{statement.id} has the score {statement.score:g}, which is not from 0 to 1"
            raise UnreadableReplyError(why, "out_of_range")
        before = found.setdefault(statement.id, statement)
        if not math.isclose(before.score, statement.score, abs_tol=1e-9):
            raise UnreadableReplyError(
                f"{statement.id} has two scores, {before.score:g} and {statement.score:g}"
            )
    if missing := [i for i in ids if i not in found]:
        raise UnreadableReplyError(f"{', '.join(missing)} have no score")
    return ParsedScores(
        {i: found[i].score for i in ids}, {i: found[i].explanation[:_MAX_EXPLANATION] for i in ids}
    )


def _without_thinking(reply: str) -> str:
    """Remove the thinking before the answer. A server may have removed the tag that opens it."""
    if (thinking := _THINKING.match(reply)) is not None:
        return reply[thinking.end() :]
    if reply.count(_THINKING_END) == 1 and reply.lstrip()[:1] not in ("{", "["):
        return reply.partition(_THINKING_END)[2]
    return reply


# -- documents -----------------------------------------------------------------------------------------------------


def _scan_documents(text: str) -> Iterator[Document]:
    """Yield every outermost object and list in `text` in order, without broken ones.

    After a mistake the scan goes on at the mistake, never before it: what breaks a document makes the whole of it
    unreadable, and the work is linear in the length of the text."""
    position = 0
    while (opening := _OPENING.search(text, position)) is not None:
        start = opening.start()
        try:
            value, position = _JSON.raw_decode(text, start)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated string"):
                return  # it holds the rest of the text
            position = max(error.pos, start + 1)
        else:
            yield Document(value, start, position)


def _in_documents(text: str, ids: Ids) -> list[_Statement]:
    """Return the statements in JSON, which has to name every id, and those of the lines beside it. Empty without JSON
    that names an id."""
    documents = list(_scan_documents(text))
    entries: list[Document] = []
    statements: list[_Statement] = []
    for document in documents:
        numbers = list(_numbers(document.value, ids))
        if entries or any(n.id is not None for n in numbers):
            entries.append(document)
            statements += numbers
    if not entries:
        return []
    if len({s.id for s in statements} - {None}) < len(ids):
        return statements  # what JSON lacks is not taken from lines: those may be the rest of a broken entry
    outside = [text[: entries[0].start]]
    ends = [*(d.start for d in entries[1:]), len(text)]
    for document, end in zip(entries, ends, strict=True):
        gap = text[document.end : end]
        if _BRACKET.search(gap):
            raise UnreadableReplyError("a bracket stands outside of the JSON that has the scores")
        outside.append(gap)
    return statements + [s for section in _sections("\n".join(outside), ids) for s in section.stated]


def _numbers(value: Any, ids: Ids, names: frozenset[str] = frozenset()) -> Iterator[_Statement]:
    """Return every number in a document. `names`: the ids that the document or the key before it names."""
    if not isinstance(value, Object):
        for inner in value:
            if isinstance(inner, list):
                yield from _numbers(inner, ids)
            elif (number := _number(inner)) is not None:
                yield _Statement(None, number)
        return
    members = [(key, _normalize(key), inner) for key, inner in value]
    named = {_find_id(inner, ids) for _, key, inner in members if key in _ID_KEYS} | names
    name = next(iter(named - {None})) if len(named - {None}) == 1 else None
    explanation = next((v for _, k, v in members if k in _EXPLANATION_KEYS and isinstance(v, str)), "")
    for key, normalized, inner in members:
        by_key = _find_id(key, ids)
        if isinstance(inner, list):
            yield from _numbers(inner, ids, frozenset({by_key} if by_key else ()))
        elif normalized in _ID_KEYS or (normalized in _EXPLANATION_KEYS and isinstance(inner, str)):
            continue
        elif (number := _number(inner)) is not None:
            yield _Statement(by_key or (name if normalized in _SCORE_KEYS else None), number, explanation)


def _normalize(key: str) -> str:
    """Return a key in lower case with underscores: `Final Score`, `final-score` and `final_score` are the same."""
    return re.sub(r"[\s_-]+", "_", key.strip()[:_MAX_NUMBER].lower())


def _find_id(name: Any, ids: Ids) -> str | None:
    """Return the id in `name`, without the label and punctuation around it, or `None`."""
    if not isinstance(name, str):
        return None
    text = name.strip().lower()
    if text in ids:
        return ids[text]
    match = _NAME.fullmatch(text) if len(text) <= _MAX_NAME else None
    return ids.get(match.group(1)) if match is not None else None


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


# -- prose ---------------------------------------------------------------------------------------------------------


@dataclass
class _Section:
    """The text from a line that begins with an id to the next such line."""

    id: str
    stated: list[_Statement] = field(default_factory=list)
    """Scores on that line, or on a line of their own."""
    numbers: list[float] = field(default_factory=list)
    """All numbers."""
    score_lines: list[str] = field(default_factory=list)


def _in_prose(text: str, ids: Ids, evidence: str) -> Iterator[_Statement]:
    """Return the statements in lines. A number that may be a score counts as one."""
    sections = _sections(text, ids)
    said = _words(evidence) if any(section.score_lines for section in sections) else ""
    scored = {section.id for section in sections if section.stated}
    for section in sections:
        if line := next((line for line in section.score_lines if _words(line) in said), ""):
            raise UnreadableReplyError(f"the score {line.strip()!r} of {section.id} may be a quotation")
        yield from section.stated
        yield from (
            _Statement(section.id, n) for n in section.numbers if section.id in scored and 0 <= n <= 1
        )


def _sections(text: str, ids: Ids) -> list[_Section]:
    sections: list[_Section] = []
    for line in text.splitlines():
        head, start = line.rstrip()[:_MAX_LINE], 0
        match = _LINE.match(head) or _HEADING.fullmatch(head)
        if match is not None and (name := _find_id(match["id"], ids)) is not None:
            sections.append(_Section(name))
            start = match.end("id")
        elif not sections:
            continue
        elif (match := _SCORE_LINE.fullmatch(head)) is not None:
            sections[-1].score_lines.append(head)
        section, stated = sections[-1], match.groupdict() if match is not None else {}
        if (score := _number(stated.get("score"))) is not None:
            section.stated.append(_Statement(section.id, score, stated.get("why", "").strip()))
        numbers = (_number(m.group()) for m in _ANY_NUMBER.finditer(line, start))
        section.numbers += [n for n in numbers if n is not None]
    return sections


def _words(text: str) -> str:
    """Return a text without differences of case, markup, punctuation and spaces."""
    return _NOT_A_WORD.sub(" ", text.lower()).strip(" .")
