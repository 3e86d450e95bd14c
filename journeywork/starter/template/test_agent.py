"""Run with `pytest`. No model and no gateway is needed."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from agent import Task, held_out, play, reward, training

from journeywork import Trajectory


@pytest.mark.parametrize(("text", "expected"), [("7", 1.0), ("It is 7.", 1.0), ("17", 0.25), ("none", 0.0)])
def test_reward(text: str, expected: float) -> None:
    assert reward(text, Task("t", "3+4=", 7)) == expected


def test_held_out_tasks_are_not_trained_on() -> None:
    trained = {task.question for number in range(50) for task in training(number)}
    assert not trained & {task.question for task in held_out()}


def test_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        message = {"role": "assistant", "content": "7"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json=body)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(Trajectory, "openai", {"base_url": "http://test/v1", "api_key": "k", "http_client": client})
    run = Trajectory("t", "starter_model", "g", "http://test/v1", "k")
    assert asyncio.run(play(run, Task("t", "3+4=", 7))) == 1.0
    assert run.metrics["right"] == 1.0
