"""Writes scores to Langfuse, and names the Langfuse project that the environment sets.

The path and the fields are those of Langfuse's published OpenAPI file; `tests/kits/langfuse_api.json` holds the
part that is used.
"""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from pipeline.backoff import Backoff
from pipeline.config import ConfigError
from pipeline.telemetry.logs import get_logger

log = get_logger("pipeline.telemetry.langfuse")

_AT_ONCE = 100
"""Scores in one request."""
_TIMEOUT_S = 30.0
_RETRY_S, _RETRY_LONGEST_S = 1.0, 30.0
_LATER = frozenset({401, 403, 408, 425, 429})
"""Statuses after which the same request may succeed: a key can be corrected, a limit passes."""
_SOME_REFUSED = 207


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
    """A score of `POST /api/public/scores`. One with a known `id` and `timestamp` is replaced, not doubled."""

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


class Langfuse:
    """A client."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    @classmethod
    @asynccontextmanager
    async def connect(cls, to: Destination) -> AsyncIterator[Langfuse]:
        headers = {"Authorization": to.authorization, "Content-Type": "application/json"}
        async with httpx.AsyncClient(base_url=to.url, headers=headers, timeout=_TIMEOUT_S) as client:
            yield cls(client)

    async def put(self, scores: Sequence[Score]) -> None:
        """Write scores. Repeat a request for as long as that may help. Scores that Langfuse refuses are logged and
        left out."""
        for first in range(0, len(scores), _AT_ONCE):
            backoff = Backoff(_RETRY_S, _RETRY_LONGEST_S)
            while not await self._post(scores[first : first + _AT_ONCE]):
                await backoff.wait()

    async def _post(self, scores: Sequence[Score]) -> bool:
        """Send scores. Return whether the request is done with; false: it may succeed later."""
        try:
            answer = await self._client.post("/api/public/scores", content=msgspec.json.encode(scores))
        except httpx.HTTPError as error:
            log.warning("Langfuse does not answer; trying again", error=str(error) or type(error).__name__)
            return False
        if answer.status_code in _LATER or answer.status_code >= 500:
            log.warning(
                "Langfuse took no scores; trying again", status=answer.status_code, answer=answer.text[:200]
            )
            return False
        if not answer.is_success or answer.status_code == _SOME_REFUSED:
            log.error(
                "Langfuse refused scores",
                scores=len(scores),
                status=answer.status_code,
                answer=answer.text[:200],
            )
        return True
