"""The SDK against a real gateway."""

from __future__ import annotations

import anyio
import anyio.to_thread
import openai
import pytest

from journeyman import AsyncJourneyman, GatewayUnavailableError, Journeyman, JourneymanError
from tests.rollout_gateway.conftest import GatewayProcess, gateway, start_gateway
from tests.rollout_gateway.kit import ASK

pytestmark = [pytest.mark.anyio, pytest.mark.inference]

__all__ = ["gateway", "start_gateway"]  # fixtures


async def test_a_run_from_open_to_complete(gateway: GatewayProcess) -> None:
    with Journeyman(gateway.url) as jm:
        with jm.trajectory("tictactoe", group="g", task="play") as run:
            openai.OpenAI(**run.openai).chat.completions.create(**ASK)
            run.reward = 0.25
        got = jm.get(run.id)
        assert (got["status"], got["reward"], got["exchanges"], got["task"]) == ("completed", 0.25, 1, "play")
        assert jm.policies()[0]["version"] == "tictactoe@0"
        with pytest.raises(JourneymanError) as refused:
            jm.complete(run.id, reward=1.0)
        assert (refused.value.status, refused.value.code) == (409, "trajectory_completed")


async def test_a_failed_run_has_no_result(gateway: GatewayProcess) -> None:
    async with AsyncJourneyman(gateway.url) as jm:
        with pytest.raises(ZeroDivisionError):
            async with jm.trajectory("tictactoe") as run:
                _ = 1 / 0
        assert (await jm.get(run.id))["outcome"] == "no_result"


async def test_calls_wait_for_a_gateway_that_restarts(gateway: GatewayProcess) -> None:
    async with AsyncJourneyman(gateway.url) as jm:
        run = await jm.open("tictactoe")
        gateway.kill()
        async with anyio.create_task_group() as tg:
            tg.start_soon(jm.complete, run.id)
            await anyio.to_thread.run_sync(gateway.start)
        assert (await jm.get(run.id))["status"] == "completed"


async def test_no_gateway_is_said_so() -> None:
    with Journeyman("http://127.0.0.1:9", wait_s=0.1) as jm, pytest.raises(GatewayUnavailableError):
        jm.policies()
