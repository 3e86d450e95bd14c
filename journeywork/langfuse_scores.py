"""What people say in Langfuse, in the interface or in an annotation queue, as rows of feedback.

The environment names the project: LANGFUSE_BASE_URL (or LANGFUSE_HOST), LANGFUSE_PUBLIC_KEY, LANGFUSE_SECRET_KEY. Read
are version 3 of the scores and version 2 of the observations, the oldest that current servers have.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

_PAGE = "100"
_TIMEOUT_S = 30.0


def rows(days: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each score that a person gave in the last `days`; a score that was changed has another key.

    Scores of sessions, and of traces that show no run, are left out. Raises `ValueError` without a project, and
    `httpx.HTTPError`."""
    names = ("LANGFUSE_BASE_URL", "LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY")
    url, public, secret = (os.environ.get(name, "") for name in names)
    url = url or os.environ.get("LANGFUSE_HOST", "")
    if not (url and public and secret):
        raise ValueError(f"no project of Langfuse is named: set {', '.join(names)}")
    with httpx.Client(base_url=url, auth=(public, secret), timeout=_TIMEOUT_S) as client:
        langfuse = _Project(client)
        since = (datetime.now(UTC) - timedelta(days=days)).isoformat()
        asked = {"source": "ANNOTATION", "fromTimestamp": since, "fields": "details,subject,annotation", "limit": _PAGE}
        while True:
            answer = langfuse.get("/api/public/v3/scores", asked)
            for score in answer["data"]:
                if (about := langfuse.subject_of(score)) and (said := langfuse.grade_of(score)):
                    row = {"name": score["name"], **about, **said}
                    digest = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
                    yield {**row, "key": f"{score['id']}/{digest[:16]}"[-200:], "source": "langfuse"}
            if not (cursor := answer["meta"].get("cursor")):
                return
            asked = {**asked, "cursor": cursor}


class _Project:
    """A project of Langfuse. What was read once is remembered."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client
        self._traces: dict[str, list[dict[str, Any]]] = {}
        self._configs: dict[str, dict[str, Any]] = {}

    def get(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any]:
        answer = self._client.get(path, params=params)
        answer.raise_for_status()
        return dict(answer.json())

    def subject_of(self, score: dict[str, Any]) -> dict[str, Any]:
        """Return the run that a score is about, and the call if it is about a model call's observation. Empty if it is
        about none."""
        subject = score.get("subject") or {}
        trace = subject.get("id") if subject.get("kind") == "trace" else subject.get("traceId")
        if not trace:
            return {}
        if trace not in self._traces:
            params = {"traceId": trace, "fields": "core,metadata", "expandMetadata": "trajectory,seq", "limit": "1000"}
            self._traces[trace] = self.get("/api/public/v2/observations", params)["data"]
        known = {o["id"]: o.get("metadata") or {} for o in self._traces[trace]}
        shown = known.get(subject["id"]) or next((m for m in known.values() if m.get("trajectory")), {})
        if not shown.get("trajectory"):
            return {}
        call = {"call": str(shown["seq"])} if subject["id"] in known and "seq" in shown else {}
        return {"trajectory": str(shown["trajectory"]), **call}

    def grade_of(self, score: dict[str, Any]) -> dict[str, Any]:
        """Return what a score says. A number is on the scale of its configuration, if that has one; a category is its
        number. Empty if it says nothing."""
        value, kind = score["value"], score["dataType"]
        comment = {"text": score["comment"]} if score.get("comment") else {}
        if kind in ("CORRECTION", "TEXT"):
            return {"correction" if kind == "CORRECTION" else "text": value} if value else {}
        config = self._config(score["configId"]) if score.get("configId") else {}
        categories = {c["label"]: c["value"] for c in config.get("categories") or ()}
        if kind == "CATEGORICAL":
            if value not in categories:
                return {}
            scale = [min(categories.values()), max(categories.values())]
            value = categories[value]
        else:
            scale = [config.get("minValue"), config.get("maxValue")]
        given = {"value": float(value), **comment}
        return {**given, "scale": scale} if None not in scale and scale[0] < scale[1] else given

    def _config(self, name: str) -> dict[str, Any]:
        if name not in self._configs:
            self._configs[name] = self.get(f"/api/public/score-configs/{name}")
        return self._configs[name]
