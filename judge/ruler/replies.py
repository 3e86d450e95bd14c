"""Parses a judge's reply: the score that the judge gave each trajectory, or nothing.

A judge may quote what an agent wrote, without escaping or marking it. So a reply is read only if it is what was asked
for, to the letter: one JSON object, with no key more or fewer, and each score a number. Two things keep a quotation
from becoming a score:

- The key of the scores is drawn for the call. No text that was written before has it, so a score is what the judge
  wrote behind that key. It stands in the reply once for each id.
- In strict JSON every word is in a string. A quotation mark too many turns the judge's next key into bare words, so
  nothing that the judge wrote can disappear in a string.

Around the object there may be a code fence and words, but no digit: an id, a number or a second object may be another
answer. Thinking from a `<think>` that begins the reply to its only `</think>` is skipped. Everything else is unreadable
as a whole, and the judge is asked again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from judge.models.chat import well_formed

_THINKING_BEGIN = re.compile(r"\s*+<think>")
_THINKING_END = "</think>"
_MAX_EXPLANATION = 2_000


class UnreadableReplyError(Exception):
    """A reply gives no scores beyond doubt. The message says why, for logs and for the judge model, so it has no text
    and no score of the reply: a judge may have taken them over from a run."""


@dataclass(frozen=True)
class Scale:
    """The numbers that a score may be."""

    words: str
    low: float
    high: float
    whole: bool = False
    """Only whole numbers."""

    def __contains__(self, score: float) -> bool:
        """Return whether a score is on the scale."""
        return self.low <= score <= self.high and (not self.whole or score.is_integer())


SCORES = Scale("from 0 to 1", 0.0, 1.0)
VOTES = Scale("-1, 0 or 1", -1.0, 1.0, whole=True)


@dataclass(frozen=True)
class ParsedScores:
    """The scores of a reply, for all ids that were asked for."""

    scores: dict[str, float]
    """By id, within the scale asked for."""
    explanations: dict[str, str]
    hints: dict[str, str]
    """By id; empty if none were asked for."""


def parse_scores(
    reply: str, ids: Collection[str], score_key: str, scale: Scale = SCORES, hint_key: str = ""
) -> ParsedScores:
    """Return the scores in `reply` for `ids`. `score_key` is the key of a score and `hint_key` that of a hint (empty:
    there is none), which were drawn for the call.

    Raises `UnreadableReplyError` unless the reply gives each id one score. Takes time linear in the reply's length."""
    answer = _without_thinking(reply)
    drawn_keys = [score_key, hint_key] if hint_key else [score_key]
    for key in drawn_keys:
        if (count := answer.count(key)) != len(ids):
            raise UnreadableReplyError(f"{key} stands in it {count} times, for {len(ids)} ids")
    start, end = answer.find("{"), answer.rfind("}") + 1
    if any(character.isnumeric() for character in answer[:start] + answer[end:]):
        raise UnreadableReplyError("an id or a number stands outside of the JSON object")
    scores: dict[str, float] = {}
    explanations: dict[str, str] = {}
    hints: dict[str, str] = {}
    for entry in _entries(answer[start:end]):
        if not isinstance(entry, dict) or entry.keys() != {"id", "explanation", *drawn_keys}:
            raise UnreadableReplyError(f"an entry has not the keys id, explanation and {' and '.join(drawn_keys)}")
        name, explanation, score = entry["id"], entry["explanation"], entry[score_key]
        hint = entry[hint_key] if hint_key else ""
        if not isinstance(name, str) or name not in ids or name in scores:
            raise UnreadableReplyError("it has an id that is not an attempt's, or two scores of one")
        if not (isinstance(explanation, str) and isinstance(hint, str) and isinstance(score, float)):
            raise UnreadableReplyError("it has a score that is no number, or an explanation or a hint that is no text")
        if score not in scale:
            raise UnreadableReplyError(f"it has a score that is not {scale.words}")
        scores[name], explanations[name] = score, well_formed(explanation)[:_MAX_EXPLANATION]
        hints[name] = well_formed(hint)[:_MAX_EXPLANATION]
    if missing := [i for i in ids if i not in scores]:
        raise UnreadableReplyError(f"{', '.join(missing)} have no score")
    return ParsedScores(scores, explanations, hints)


def _without_thinking(reply: str) -> str:
    """Return a reply without the thinking at its beginning. Raises `UnreadableReplyError` if there is not exactly one
    end of it."""
    if _THINKING_BEGIN.match(reply) is None:
        return reply
    _, *answers = reply.split(_THINKING_END)
    if len(answers) != 1:
        raise UnreadableReplyError(f"{_THINKING_END} stands in it {len(answers)} times, not once")
    return answers[0]


def _entries(text: str) -> list[Any]:
    """Return the list of `{"scores": [...]}`. Raises `UnreadableReplyError` if `text` is anything else."""
    try:
        # Line breaks in strings are accepted: they do not change which text is a string.
        document = json.loads(text, object_pairs_hook=_object, parse_int=float, strict=False)
    except (ValueError, RecursionError) as error:
        raise UnreadableReplyError(f"it is not one JSON object: {error}") from error
    entries = document.get("scores")
    if len(document) != 1 or not isinstance(entries, list):
        raise UnreadableReplyError("the JSON object has not the one key scores with a list")
    return entries


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's keys and values as a dict, for `json.loads`. Raises `ValueError` if a key occurs twice."""
    if len(unique := dict(members)) < len(members):
        raise ValueError("a key occurs twice in an object")
    return unique
