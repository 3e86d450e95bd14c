"""Events to Langfuse scores: the reward of a trajectory, its components, and what each judge said of it.

The id of a score is a hash of its event, so a score that is sent twice is one score.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any

from pipeline.events import GroupScored, Member, TrajectoryCompleted
from pipeline.telemetry.content import Content
from pipeline.telemetry.langfuse import Score
from pipeline.telemetry.spans import verdict_span_id
from pipeline.telemetry.trace import Run, hashed


def _score(identity: tuple[str, ...], run: Run, name: str, value: float, at_us: int, **more: Any) -> Score:
    return Score(
        id=f"{hashed('score', *identity, run.trajectory, name, size=16):032x}",
        trace_id=f"{run.trace:032x}",
        name=name,
        value=value,
        data_type="NUMERIC",
        timestamp=datetime.fromtimestamp(at_us / 1e6, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z"),
        environment=os.environ.get("LANGFUSE_TRACING_ENVIRONMENT", ""),
        **more,
    )


def agent_scores(event: TrajectoryCompleted, run: Run) -> list[Score]:
    """Return the rewards that the agent itself gave."""
    rewards = dict(event.rewards) | ({} if event.reward is None else {"": event.reward})
    metadata = {"given_by": "agent", "outcome": event.outcome}
    return [
        _score(
            (event.message_id(),), run, f"agent_reward.{name}" if name else "agent_reward", value, event.at,
            observation_id=f"{run.root:016x}", metadata=metadata,
        )
        for name, value in rewards.items()
    ]  # fmt: skip


def verdict_scores(event: GroupScored, member: Member, run: Run, content: Content) -> list[Score]:
    """Return the reward of a member of a group, its components, and the score of each verdict on it."""
    branch = "" if event.branch == "main" else f"{event.branch}/"
    identity = (event.message_id(),)
    common = {"judge": event.judge, "group": event.group, "branch": event.branch}
    whole = {"observation_id": f"{run.root:016x}", "metadata": common}
    out = [_score(identity, run, f"{branch}reward", member.reward, event.at, **whole)]
    for name, value in member.components.items():
        out.append(_score(identity, run, f"{branch}reward.{name}", value, event.at, **whole))
    for number, verdict in enumerate(event.verdicts):
        for said in verdict.scores:
            if said.trajectory != member.trajectory or verdict.judge_model == "agent":
                continue
            name = f"{branch}judge.{verdict.rubric or 'default'}"
            metadata = {
                **common,
                "judge_model": verdict.judge_model,
                "rubric_hash": verdict.rubric_hash,
                "pass": number,
            }
            out.append(
                _score(
                    (*identity, str(number)), run, name, said.score, event.at, metadata=metadata,
                    observation_id=f"{verdict_span_id(event, member.trajectory):016x}",
                    comment=content.text(said.explanation),
                )
            )  # fmt: skip
    return out
