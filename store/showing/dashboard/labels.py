"""A person's scores or ranking of a group's members: the page's form to the body of the gateway's label route."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from store.showing.dashboard.errors import PageError


def body(form: Mapping[str, str]) -> dict[str, Any]:
    """The body for a form with the fields `score:<trajectory>`, `place:<trajectory>` and `comment:<trajectory>`.

    Places rank members, the best is 1, and equal places are a tie; the first place becomes score 1 and the last 0.
    Raises `PageError` where nothing was given, or both scores and places."""
    given: dict[str, dict[str, str]] = {"score": {}, "place": {}, "comment": {}}
    for field, text in form.items():
        what, _, trajectory = field.partition(":")
        if trajectory and what in given and text.strip():
            given[what][trajectory] = text.strip()
    ranked = bool(given["place"])
    if ranked and given["score"]:
        raise PageError(400, "Give scores or places, not both: a label is a scoring or a ranking.")
    scores = _ranking(given["place"]) if ranked else {t: _score(text) for t, text in given["score"].items()}
    if not scores:
        raise PageError(400, "Give at least one trajectory a score from 0 to 1, or give places from 1.")
    if stray := given["comment"].keys() - scores.keys():
        raise PageError(400, f"The comment on {min(stray)[:80]!r} needs a score or a place beside it.")
    listed = [
        {"trajectory": t, "score": s, "comment": given["comment"].get(t, "")} for t, s in scores.items()
    ]
    return {"labels": listed, "ranked": ranked, "by": form.get("by", "").strip(), "source": "dashboard"}


def _ranking(places: Mapping[str, str]) -> dict[str, float]:
    for text in places.values():
        if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) >= 1):
            raise PageError(400, f"A place is a whole number from 1, not {text[:40]!r}.")
    order = sorted({int(text) for text in places.values()})
    if len(places) < 2:
        raise PageError(400, "A ranking needs the places of at least two trajectories.")
    steps = max(1, len(order) - 1)
    return {trajectory: 1 - order.index(int(text)) / steps for trajectory, text in places.items()}


def _score(text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not 0 <= score <= 1:
        raise PageError(400, f"A score is a number from 0 to 1, not {text[:40]!r}.")
    return score
