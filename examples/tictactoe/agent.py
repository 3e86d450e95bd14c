"""Agents that play with an OpenAI client: each game is one run, and its calls go to the run's own base URL."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from examples.tictactoe.game import Game, describe
from journeywork import Trajectory

MAX_TOKENS = 1
"""A cell's name is one token and a complete move, so the end of the turn is not sampled."""


async def moves(agent: openai.AsyncOpenAI, model: str, game: Game) -> AsyncIterator[tuple[str, ChatCompletion]]:
    """Play a game to its end. Yields each board that the model was shown with the model's answer. Raises
    `openai.APIError`."""
    messages: list[ChatCompletionMessageParam] = []
    while game.result is None:
        board = game.board
        messages.append({"role": "user", "content": describe(board)})
        answer = await agent.chat.completions.create(
            model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=1.0
        )
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        game.play(text)
        yield board, answer


@dataclass
class Agents:
    """Agents on one connection pool, and what they count."""

    client: openai.AsyncOpenAI
    calls: int = 0
    failed: int = 0
    """Requests that failed after the client's own retries."""
    last_error: str = ""
    latency_s: float = 0.0
    """Seconds, summed over all calls."""
    runs: list[str] = field(default_factory=list)
    """Ids of the trajectories that were played."""

    @classmethod
    def at(cls, gateway: str, key: str = "none") -> Agents:
        """Agents for the gateway at this URL; close them with `await agents.client.close()`."""
        return cls(openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key=key, max_retries=12, timeout=120))

    async def play_game(self, agent: openai.AsyncOpenAI, model: str, seed: str) -> tuple[Game, ChatCompletion]:
        """Play the game of `seed` with an agent's client. Returns it with the last answer. Raises `openai.APIError`."""
        game, began = Game(seed), time.monotonic()
        try:
            async for _, answer in moves(agent, model, game):
                last, now = answer, time.monotonic()
                self.calls += 1
                self.latency_s += now - began
                began = now
        except openai.APIError as error:
            self.failed += 1
            self.last_error = f"{type(error).__name__}: {error}"
            raise
        return game, last

    async def play(self, run: Trajectory, seed: str) -> tuple[Game, int]:
        """Play the game of `seed` as a run. Returns it with the policy step that made its last move.

        Raises `openai.APIError` if a call failed: the run has no result then, so that a failure of infrastructure
        never counts as a lost game."""
        self.runs.append(run.id)
        agent = self.client.with_options(base_url=run.base_url, api_key=run.api_key)
        game, last = await self.play_game(agent, run.model, seed)
        run.metrics = {"win": float(game.result == "win"), "moves": float(game.moves)}
        run.metadata = {"result": game.result, "board": game.board}
        return game, int(last.model.rpartition("@")[2])
