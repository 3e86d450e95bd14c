"""RULER: a judge model scores the trajectories of a group relative to each other.

It is the judge of an installation (docs/judging.md), for programs that score their groups themselves: a process
`journeywork judge serve` judges in several orders, without the effect of positions, asks again where a reply can't be
read, and takes what trajectories say for evidence, never for instructions. Nothing is recorded.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from tempfile import NamedTemporaryFile
from typing import Any

import pydantic
from openai.types.chat import ChatCompletionMessageParam

from journeywork.art.rewards.judge_process import JudgeDiedError, ask_judge
from journeywork.art.trajectories import TrajectoryGroup
from journeywork.art.types import Tools

log = logging.getLogger("journeywork.art")

DEFAULT_RUBRIC = """\
- What counts is whether the goal in the task is reached. A trajectory that reaches it scores clearly above one \
that does not.
- Between two that reach it, the one with fewer wasted or wrong steps scores higher.
- A trajectory that comes part of the way scores in between, by how far it came.
- Small differences in quality are small differences in score.
"""
_KEY = "JOURNEYWORK_RULER_KEY"
"""Beginning of the environment variable that hands a judge's key to its process."""
_SETTINGS = {
    "api_base": "api_base",
    "base_url": "api_base",
    "timeout": "request.timeout_s",
    "num_retries": "request.retries",
    "max_retries": "request.retries",
    "temperature": "request.temperature",
    "max_tokens": "request.max_tokens",
}
"""litellm's names of what is a setting of the judge. Everything else is a parameter of its requests."""


class TrajectoryScore(pydantic.BaseModel, extra="forbid"):
    """A judge's score of one trajectory."""

    trajectory_id: str
    """Position of the trajectory, from 1."""
    explanation: str
    score: float = pydantic.Field(ge=0, le=1)


async def ruler(
    message_lists: Sequence[Sequence[ChatCompletionMessageParam]],
    judge_model: str = "openai/o3",
    extra_litellm_params: Mapping[str, object] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    tools: Tools | None = None,
    *,
    debug: bool = False,
) -> list[TrajectoryScore]:
    """Score conversations relative to each other. Returns a score for each, in their order.

    `judge_model` is a name as litellm takes it. `extra_litellm_params` are passed on. `debug` logs the judge's scores
    and explanations. Raises `ValueError` with the reason if no judging gave scores."""
    if not message_lists:
        return []
    names = [str(number) for number in range(1, len(message_lists) + 1)]
    trajectories = [{"id": n, "messages": list(messages)} for n, messages in zip(names, message_lists, strict=True)]
    group = {"tools": list(tools or ()), "trajectories": trajectories}
    answer = await _judge(group, judge_model, dict(extra_litellm_params or {}), rubric)
    if debug:
        log.warning("the judge replied: %s", answer)
    return [
        TrajectoryScore(
            trajectory_id=name,
            explanation=next(iter(answer["explanations"].get(name, ())), ""),
            score=answer["scores"][name],
        )
        for name in names
    ]


async def ruler_score_group(
    group: TrajectoryGroup,
    judge_model: str = "openai/o3",
    extra_litellm_params: Mapping[str, object] | None = None,
    rubric: str = DEFAULT_RUBRIC,
    *,
    swallow_exceptions: bool = False,
    debug: bool = False,
) -> TrajectoryGroup | None:
    """Return a copy of the group with the judge's scores as rewards.

    The former reward is the metric `independent_reward`, the score also `ruler_score`, and the explanation is the last
    line of `logs`. With `swallow_exceptions`, an error is logged and `None` is returned. Raises `ValueError` for a
    trajectory with additional histories, and as `ruler` does."""
    scored = group.model_copy(deep=True)
    trajectories = scored.trajectories
    try:
        if any(trajectory.additional_histories for trajectory in trajectories):
            raise ValueError("RULER shows a judge one conversation for each trajectory; one has additional_histories")
        tools = trajectories[0].tools if trajectories else None
        scores = await ruler(
            [t.messages() for t in trajectories], judge_model, extra_litellm_params, rubric, tools, debug=debug
        )
    except Exception as error:
        if not swallow_exceptions:
            raise
        log.warning("a group was not scored: %r", error)
        return None
    for trajectory, score in zip(trajectories, scores, strict=True):
        trajectory.metrics["independent_reward"] = trajectory.reward
        trajectory.metrics["ruler_score"] = score.score
        trajectory.reward = score.score
        trajectory.log(f"RULER explanation: {score.explanation}")
    return scored


async def _judge(group: dict[str, Any], model: str, params: dict[str, Any], rubric: str) -> dict[str, Any]:
    """Return the judge's answer. Raises `ValueError` with its reason if it gave no scores."""
    settings: dict[str, Any] = {"model": model}
    environment = dict(os.environ)
    if key := str(params.pop("api_key", None) or ""):
        settings["api_key_env"] = f"{_KEY}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        environment[settings["api_key_env"]] = key
    given = {name: params.pop(name) for name in list(params) if name in _SETTINGS}
    settings |= {_SETTINGS[name]: value for name, value in given.items() if value is not None}
    with NamedTemporaryFile("w", suffix=".md", encoding="utf-8") as file:
        file.write(rubric)
        file.flush()
        settings["rubric"] = file.name
        if params:
            settings["request.params"] = json.dumps(params)
        request = {"group": group, "settings": [f"judge.{name}={value}" for name, value in settings.items()]}
        try:
            answer = await ask_judge(request, environment)
        except JudgeDiedError as died:
            if "No module named" in str(died):
                why = f"RULER needs the judge: install journeywork[judge] ({str(died).splitlines()[-1]})"
                raise ModuleNotFoundError(why) from died
            raise ValueError(f"the judge {model} scored nothing: its process died twice: {died}") from died
    if not answer["scores"]:
        raise ValueError(f"the judge {model} scored nothing: {answer.get('error')}")
    return answer
