"""An OpenEnv server: an episode of two steps, each rewarded by the length of the message.

python counting_server.py PORT
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Message(Action):
    message: str


class Board(Observation):
    text: str = ""


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._steps, self._seed = 0, 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Board:
        self._steps, self._seed = 0, seed or 0
        return Board(text=f"a1={'xo'[self._seed % 2]}")

    def step(self, action: Message, timeout_s: float | None = None, **_: Any) -> Board:
        self._steps += 1
        return Board(
            text="b2=x",
            reward=min(len(action.message), 40) / 40,
            done=self._steps == 2,
            metadata={"seed": self._seed},
        )

    @property
    def state(self) -> State:
        return State(step_count=self._steps)


if __name__ == "__main__":
    app = create_fastapi_app(Counting, Message, Board, max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
