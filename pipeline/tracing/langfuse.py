"""Langfuse: the project that the environment names, and its scores: the reward of a trajectory, the components of that
reward, and what each judge said.

The path and the fields are those of Langfuse's published OpenAPI file; `tests/kits/langfuse_api.json` holds the
part that is used. The id of a score is a hash of its event, so a score that is sent twice is one score.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec

from pipeline.concurrency.backoff import Backoff
from pipeline.config import ConfigError
from pipeline.events import GroupScored, Member
from pipeline.telemetry.logs import get_logger
from pipeline.tracing.spans import verdict_span_id
from pipeline.tracing.trace import Run, hashed

logger = get_logger("pipeline.tracing.langfuse")

_SCORES_PER_REQUEST = 100
_TIMEOUT_S = 30.0
_RETRY_S, _RETRY_LONGEST_S = 1.0, 30.0
_RETRIED_STATUSES = frozenset({401, 403, 408, 425, 429})
"""Statuses after which the same request may succeed, besides those of the server (5xx): a key can be corrected, a limit
passes."""
_SOME_REFUSED = 207
"""Status of an answer that says of each score whether it was taken."""


class Destination(msgspec.Struct, frozen=True):
    """A project of a Langfuse server."""

    url: str
    authorization: str


def destination() -> Destination | None:
    """Return the project that the variables LANGFUSE_* name; None if there is no LANGFUSE_SECRET_KEY. Raises
    `ConfigError` if there is one, and another of the variables is missing."""
    secret, public = os.environ.get("LANGFUSE_SECRET_KEY"), os.environ.get("LANGFUSE_PUBLIC_KEY")
    if not secret:
        return None
    url = os.environ.get("LANGFUSE_BASE_URL")
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


def scores(event: GroupScored, member: Member, run: Run, with_content: bool) -> list[Score]:
    """Return the Langfuse scores of a member of a scored group: its reward, the reward's components, and the score of
    each verdict on it. `with_content`: whether they have the judge's explanations."""
    branch = "" if event.branch == "main" else f"{event.branch}/"
    at = datetime.fromtimestamp(event.at / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def score(name: str, value: float, span_id: int, number: str = "", comment: str = "", **metadata: Any) -> Score:
        """`number` tells scores of one name apart, such as those of several verdicts."""
        identity = hashed("score", event.message_id(), number, run.trajectory, name, size=16)
        return Score(
            id=f"{identity:032x}",
            trace_id=f"{run.trace:032x}",
            name=f"{branch}{name}",
            value=value,
            data_type="NUMERIC",
            timestamp=at,
            observation_id=f"{span_id:016x}",
            comment=comment,
            metadata={"judge": event.judge, "group": event.group, "branch": event.branch, **metadata},
            environment=os.environ.get("LANGFUSE_TRACING_ENVIRONMENT", ""),
        )

    out = [score("reward", member.reward, run.root)]
    out += [score(f"reward.{name}", value, run.root) for name, value in member.components.items()]
    for number, verdict in enumerate(event.verdicts):
        verdict_facts = {"judge_model": verdict.judge_model, "rubric_hash": verdict.rubric_hash, "pass": number}
        name, span = f"judge.{verdict.rubric or 'default'}", verdict_span_id(event, member.trajectory)
        for verdict_score in verdict.scores:
            if verdict_score.trajectory == member.trajectory and verdict.judge_model != "agent":
                of_call = {"call": verdict_score.call} if verdict_score.call >= 0 else {}
                verdict_number = f"{number}/{verdict_score.call}" if of_call else str(number)
                comment = verdict_score.explanation if with_content else ""
                out.append(score(name, verdict_score.score, span, verdict_number, comment, **verdict_facts, **of_call))
    return out


async def put(project: Destination, scores: Sequence[Score]) -> None:
    """Write scores to a Langfuse project. A request is repeated until Langfuse takes or refuses it. Scores that it
    refuses are logged and left out."""
    headers = {"Authorization": project.authorization, "Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=project.url, headers=headers, timeout=_TIMEOUT_S) as client:
        for first in range(0, len(scores), _SCORES_PER_REQUEST):
            backoff = Backoff(_RETRY_S, _RETRY_LONGEST_S)
            while not await _post(client, scores[first : first + _SCORES_PER_REQUEST]):
                await backoff.wait()


async def _post(client: httpx.AsyncClient, scores: Sequence[Score]) -> bool:
    """Send one request with scores. Return true if Langfuse took or refused them, false if the same request may succeed
    later."""
    try:
        answer = await client.post("/api/public/scores", content=msgspec.json.encode(scores))
    except httpx.HTTPError as error:
        logger.warning("Langfuse does not answer; trying again", error=str(error) or type(error).__name__)
        return False
    facts: dict[str, Any] = {"status": answer.status_code, "answer": answer.text[:200]}
    if answer.status_code in _RETRIED_STATUSES or answer.status_code >= 500:
        logger.warning("Langfuse took no scores; trying again", **facts)
        return False
    if not answer.is_success or answer.status_code == _SOME_REFUSED:
        logger.error("Langfuse refused scores", scores=len(scores), **facts)
    return True
