"""A person's scores of a group's members, and corrections of calls: from the pages' forms to bodies of the gateway's
feedback route."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from store.showing.pages.errors import PageError


def feedback_of_scores(form: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the bodies of the gateway's feedback route by trajectory, for a form with the fields `score:<trajectory>`
    and `comment:<trajectory>`. Raises a 400 `PageError` for what is no score from 0 to 1, and if none was given."""
    texts: dict[str, dict[str, str]] = {"score": {}, "comment": {}}
    for field, text in form.items():
        kind, _, trajectory = field.partition(":")
        if trajectory and kind in texts and text.strip():
            texts[kind][trajectory] = text.strip()
    try:
        scores = {trajectory: float(text) for trajectory, text in texts["score"].items()}
    except ValueError as error:
        raise PageError(400, f"A score is a number from 0 to 1: {error}.") from error
    if not scores or not all(0 <= score <= 1 for score in scores.values()):
        raise PageError(400, "Give at least one trajectory a score from 0 to 1, and none another one.")
    if unscored := texts["comment"].keys() - scores.keys():
        raise PageError(400, f"The comment on {min(unscored)[:80]!r} needs a score beside it.")
    common = {"name": "label", "source": "dashboard"}
    return {t: {**common, "value": s, "text": texts["comment"].get(t, "")} for t, s in scores.items()}


def correction(form: Mapping[str, str]) -> dict[str, Any]:
    """Return the body of the gateway's feedback route for a form with the fields `call`, the number of a call, and
    `correction`, the answer that it should have given. The same form again is the same signal. Raises a 400
    `PageError`."""
    call, text = form.get("call", ""), form.get("correction", "").strip().replace("\r\n", "\n")
    if not (call.isascii() and call.isdigit()) or len(call) > 9:
        raise PageError(400, f"call={call[:40]!r}: write the number of a call.")
    if not text:
        raise PageError(400, "Write the answer that the call should have given.")
    key = f"correction-{call}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return {"name": "healing", "source": "dashboard", "call": int(call), "correction": text, "key": key}
