"""Langfuse's public API, as far as it is used: where spans go, scores written, scores and their traces read.

Paths and fields are those of its published OpenAPI file; `tests/kits/langfuse_api.json` holds the part that is used.
"""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import anyio
import httpx
import msgspec

from pipeline.backoff import Backoff
from pipeline.config import ConfigError
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.telemetry.langfuse")

PAGE = 100
"""Scores asked for at once: the most that the API allows."""
_TIMEOUT_S = 30.0
_RETRY_S, _RETRY_LONGEST_S = 1.0, 30.0
_LATER = frozenset({401, 403, 408, 425, 429})
"""Statuses after which the same request may succeed: a key can be corrected, a limit passes."""


class LangfuseError(Exception):
    """Langfuse did not do what was asked. `status` is its answer; 0: none came."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in _LATER or self.status >= 500 or not self.status


class Destination(msgspec.Struct, frozen=True):
    """A project of a Langfuse server."""

    url: str
    authorization: str


def destination() -> Destination | None:
    """Return the project that LANGFUSE_* name; None if they name none. Raises `ConfigError` if one is missing."""
    secret, public = os.environ.get("LANGFUSE_SECRET_KEY"), os.environ.get("LANGFUSE_PUBLIC_KEY")
    if not secret:
        return None
    url = os.environ.get("LANGFUSE_BASE_URL") or os.environ.get("LANGFUSE_HOST")
    if not public or not url:
        raise ConfigError("LANGFUSE_SECRET_KEY is set: set LANGFUSE_PUBLIC_KEY and LANGFUSE_BASE_URL too")
    token = base64.b64encode(f"{public}:{secret}".encode()).decode()
    return Destination(url.rstrip("/"), f"Basic {token}")


class Score(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Body of `POST /api/public/scores`. A score with a known `id` and `timestamp` is replaced, not doubled."""

    id: str
    trace_id: str
    name: str
    value: float
    data_type: str
    timestamp: str
    observation_id: str = ""
    comment: str = ""
    metadata: dict[str, Any] = {}
    environment: str = ""


class Subject(msgspec.Struct, frozen=True, rename="camel"):
    kind: str
    id: str
    trace_id: str | None = None


class ReadScore(msgspec.Struct, frozen=True, rename="camel"):
    """A score as `GET /api/public/v3/scores` returns it."""

    id: str
    name: str
    value: float | str | bool | None
    data_type: str
    comment: str | None = None
    config_id: str | None = None
    author_user_id: str | None = None
    queue_id: str | None = None
    subject: Subject | None = None

    @property
    def trace(self) -> str:
        """Id of the trace that the score is about; empty if it is about a session or an experiment."""
        if self.subject is None or self.subject.kind not in ("trace", "observation"):
            return ""
        return self.subject.id if self.subject.kind == "trace" else self.subject.trace_id or ""


class Category(msgspec.Struct, frozen=True):
    value: float
    label: str


class ScoreConfig(msgspec.Struct, frozen=True, rename="camel"):
    """The range of a score, or its categories, as a person set them up in Langfuse."""

    min_value: float | None = None
    max_value: float | None = None
    categories: list[Category] | None = None


class Langfuse:
    """A client. Every method raises `LangfuseError`."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._lists = False
        """Whether the server wants scores in lists."""
        self._configs: dict[str, ScoreConfig] = {}

    @classmethod
    @asynccontextmanager
    async def connect(cls, to: Destination) -> AsyncIterator[Langfuse]:
        headers = {"Authorization": to.authorization}
        async with httpx.AsyncClient(base_url=to.url, headers=headers, timeout=_TIMEOUT_S) as client:
            yield cls(client)

    async def _ask(self, method: str, path: str, **options: Any) -> bytes:
        try:
            answer = await self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise LangfuseError(f"{method} {path}: {str(error) or type(error).__name__}") from error
        if answer.is_success:
            return answer.content
        raise LangfuseError(f"{method} {path}: {answer.status_code} {answer.text[:200]}", answer.status_code)

    async def put_score(self, score: Score) -> None:
        """Write a score; try again for as long as that may help. A score that Langfuse refuses is logged and left."""
        backoff = Backoff(_RETRY_S, _RETRY_LONGEST_S)
        while True:
            try:
                await self._post(score)
                return
            except LangfuseError as error:
                if not error.passes:
                    log.error(
                        "Langfuse refused a score", score=score.name, trace=score.trace_id, error=str(error)
                    )
                    return
                log.warning("Langfuse took no score; trying again", error=str(error))
            await backoff.wait()

    async def _post(self, score: Score) -> None:
        """Send a score: an object, or a list of one where the server wants lists, as the newest do."""
        headers = {"Content-Type": "application/json"}
        first = self._lists  # another task may learn meanwhile what the server wants
        for as_list in (first, not first):
            body = msgspec.json.encode([score] if as_list else score)
            try:
                answer = await self._ask("POST", "/api/public/scores", content=body, headers=headers)
            except LangfuseError as error:
                if error.status != 400 or as_list is not first:
                    raise
                continue
            self._lists = as_list
            results = msgspec.json.decode(answer)
            if as_list and isinstance(results, dict) and results.get("rejected"):
                raise LangfuseError(f"POST /api/public/scores: {results.get('errors')}", 400)
            return

    async def human_scores(self, since: datetime) -> AsyncIterator[ReadScore]:
        """Yield the scores that people gave since a time: in the interface, or in an annotation queue."""
        asked = {"source": "ANNOTATION", "fromTimestamp": since.isoformat(), "limit": str(PAGE)}
        cursor: dict[str, str] = {}
        while True:
            params = {**asked, "fields": "details,subject,annotation", **cursor}
            answer = msgspec.json.decode(await self._ask("GET", "/api/public/v3/scores", params=params))
            for score in msgspec.convert(answer["data"], list[ReadScore]):
                yield score
            if not answer["meta"].get("cursor"):
                return
            cursor = {"cursor": answer["meta"]["cursor"]}

    async def score_config(self, config: str) -> ScoreConfig:
        if config not in self._configs:
            body = await self._ask("GET", f"/api/public/score-configs/{config}")
            self._configs[config] = msgspec.json.decode(body, type=ScoreConfig)
        return self._configs[config]

    async def trajectory_of(self, trace: str) -> str:
        """Return the trajectory that a trace shows; empty if the trace is not known or shows none."""
        params = {
            "traceId": trace,
            "type": "AGENT",
            "fields": "core,basic,metadata",
            "expandMetadata": "trajectory",
            "limit": "50",
        }
        answer = msgspec.json.decode(await self._ask("GET", "/api/public/v2/observations", params=params))
        metadata = [observation.get("metadata") or {} for observation in answer["data"]]
        return next((str(some["trajectory"]) for some in metadata if some.get("trajectory")), "")


async def put_scores(langfuse: Langfuse, scores: list[Score], at_once: int = 8) -> None:
    """Write scores, `at_once` at a time."""
    limit = anyio.CapacityLimiter(at_once)

    async def put(score: Score) -> None:
        async with limit:
            await langfuse.put_score(score)

    async with anyio.create_task_group() as tg:
        for score in scores:
            tg.start_soon(put, score)
