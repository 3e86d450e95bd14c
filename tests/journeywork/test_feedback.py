"""Feedback from agent code and from other programs, and from files."""

import anyio.to_thread
import numpy as np
import openai
import pytest

from journeywork import AsyncJourneywork, Journeywork, JourneyworkError
from journeywork.trajectory import Trajectory, answer_id
from pipeline.log.broker import Broker
from tests.rollout_gateway.api.test_feedback import signals
from tests.rollout_gateway.conftest import GatewayProcess, start_front
from tests.rollout_gateway.kit import ASK, exchanges

__all__ = ["start_front"]  # a fixture


async def test_agents_reward_their_calls(gateway: GatewayProcess) -> None:
    """In a coroutine, in a plain function that `gather` calls, and in blocking code."""

    def blocking(run: Trajectory, task: int) -> float:
        with openai.OpenAI(**run.openai) as agent:
            answer = agent.chat.completions.create(**ASK)
        run.reward_call(answer, np.float32(0.5))
        return 1.0

    async def play(run: Trajectory, task: int) -> float:
        async with openai.AsyncOpenAI(**run.openai) as agent:
            answer = await agent.chat.completions.create(**ASK)
        await run.reward_call({"id": answer.id}, 0.5)
        return 1.0

    def by_hand() -> None:
        with Journeywork(gateway.url) as client, client.trajectory("tictactoe") as run:
            with openai.OpenAI(**run.role("worker")) as agent:
                agent.chat.completions.create(**ASK)
            run.reward_call(0, 0.5)
            run.feedback(text="of the run")

    async with AsyncJourneywork(gateway.url) as client:
        for rollout in (play, blocking):
            (group,) = await client.gather("tictactoe", [1], rollout, group_size=1)
            assert not group.exceptions
        await anyio.to_thread.run_sync(by_hand)
        given = await signals(gateway.config.nats)
        assert [(s.call, s.value, s.text) for s in given] == [(0, 0.5, "")] * 3 + [(-1, None, "of the run")]
        async with Broker.connect(gateway.config.nats) as broker:
            (call,) = await exchanges(broker, given[-1].trajectory)
        assert call.role == "worker"
        later = await client.feedback(trajectory=given[0].trajectory, thumb="down", key="k")
        assert later["signals"][0]["run"] == "completed"
        await client.feedback(ranking=[given[0].trajectory, given[-1].trajectory])
        with pytest.raises(JourneyworkError, match="other contents") as refused:
            await client.feedback(trajectory=given[0].trajectory, thumb="up", key="k")
        assert (refused.value.status, refused.value.code) == (409, "request_exists")
    assert len(await signals(gateway.config.nats)) == 7


def test_what_is_no_answer_is_refused() -> None:
    for wrong in (None, True, 1.5, object(), {}):
        with pytest.raises(TypeError, match="is no answer"):
            answer_id(wrong)
    with pytest.raises(RuntimeError, match="no client opened"):
        Trajectory("t", "m", "g", "http://gateway", "k").feedback(thumb="up")
