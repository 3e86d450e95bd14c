"""Groups that the gateway refuses, and groups that train nothing: errors and log lines that say which and why."""

import json
import math
from typing import Any

import httpx
import pytest
from openai.types.chat.chat_completion import Choice

import journeywork.art as art
from journeywork.art.gateway import Gateway
from journeywork.art.training import record_groups, train_groups

LIMIT = 1e3


def answer(request: httpx.Request) -> httpx.Response:
    """As the gateway answers that limits rewards."""
    if request.method == "GET":
        return httpx.Response(200, json={"data": [{"model": "m", "version": "m@3", "step": 3}]})
    for member in json.loads(request.content)["trajectories"]:
        if abs(member["reward"]) > LIMIT:
            message = f"Trajectory {member['id']!r}: The value of `reward` is {member['reward']:g}."
            return httpx.Response(400, json={"error": {"message": message, "code": "reward_out_of_range"}})
    return httpx.Response(200, json={})


def group(*rewards: float, **fields: Any) -> art.TrajectoryGroup:
    choice = Choice.model_validate(
        {
            "finish_reason": "stop",
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "journeywork": {"trajectory": "t", "reply": "chatcmpl-1"},
        }
    )
    return art.TrajectoryGroup(
        [art.Trajectory(messages_and_choices=[choice], reward=reward, **fields) for reward in rewards]
    )


async def train(*groups: art.TrajectoryGroup) -> None:
    async with Gateway("http://gateway") as gateway:
        await gateway._http.aclose()
        gateway._http = httpx.AsyncClient(base_url=gateway.url, transport=httpx.MockTransport(answer))
        await train_groups(gateway, "m", groups, {})
        await record_groups(gateway, "m", groups)


async def test_a_number_that_is_not_finite_names_its_trajectory() -> None:
    with pytest.raises(ValueError, match=r"^trajectory 1 of group 1: reward must be finite, not nan$"):
        await train(group(0, 1), group(0, math.nan))
    with pytest.raises(ValueError, match=r"^trajectory 0 of group 0: metrics\['won'\] must be finite, not inf$"):
        await train(group(0, 1, metrics={"won": math.inf}))


async def test_a_refused_reward_names_its_trajectory_and_the_reason() -> None:
    said = "the gateway refused trajectory 1 of group 2: .*The value of `reward` is 1e[+]09"
    with pytest.raises(art.TrainingError, match=said):
        await train(group(0, 1), group(0, 1), group(0, 1e9))


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        ([], "there are no groups"),
        ([art.TrajectoryGroup([RuntimeError("x")])], "the 1 groups hold no trajectories, only exceptions"),
        ([group(1, 1), group(0)], "no group has two trajectories with different rewards (2 groups were given)"),
    ],
)
async def test_why_nothing_is_trained_is_logged(
    groups: list[art.TrajectoryGroup], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    await train(*groups)
    assert [record.getMessage() for record in caplog.records if record.name == "journeywork.art"] == [
        f"no step was trained: {why}"
    ]
