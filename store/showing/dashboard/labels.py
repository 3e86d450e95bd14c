"""A person's scores of a group's members, and corrections of calls: from the pages' forms to bodies of the gateway's
feedback route."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from store.showing.pages.errors import PageError


def bodies(form: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The feedback by trajectory, for a form with the fields `score:<trajectory>` and `comment:<trajectory>`. Raises
    `PageError` where no score was given."""
    given: dict[str, dict[str, str]] = {"score": {}, "comment": {}}
    for field, text in form.items():
        what, _, trajectory = field.partition(":")
        if trajectory and what in given and text.strip():
            given[what][trajectory] = text.strip()
    try:
        scores = {trajectory: float(text) for trajectory, text in given["score"].items()}
    except ValueError as error:
        raise PageError(400, f"A score is a number from 0 to 1: {error}.") from error
    if not scores or not all(0 <= score <= 1 for score in scores.values()):
        raise PageError(400, "Give at least one trajectory a score from 0 to 1, and none another one.")
    if stray := given["comment"].keys() - scores.keys():
        raise PageError(400, f"The comment on {min(stray)[:80]!r} needs a score beside it.")
    common = {"name": "label", "source": "dashboard"}
    return {t: {**common, "value": s, "text": given["comment"].get(t, "")} for t, s in scores.items()}


def correction(form: Mapping[str, str]) -> dict[str, Any]:
    """The feedback of a form with the fields `call`, the number of a call, and `correction`, the answer that it should
    have given. The same form again is the same signal. Raises `PageError`."""
    call, text = form.get("call", ""), form.get("correction", "").strip().replace("\r\n", "\n")
    if not (call.isascii() and call.isdigit()) or len(call) > 9:
        raise PageError(400, f"call={call[:40]!r}: write the number of a call.")
    if not text:
        raise PageError(400, "Write the answer that the call should have given.")
    key = f"correction-{call}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return {"name": "healing", "source": "dashboard", "call": int(call), "correction": text, "key": key}
