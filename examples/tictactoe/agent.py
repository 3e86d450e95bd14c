"""Agents that play with an OpenAI client: each game is one run, and its calls go to the run's own base URL."""

from __future__ import annotations

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from examples.tictactoe.game import Game, describe
from journeywork import Trajectory

MAX_TOKENS = 1
"""A cell's name is one token and a complete move, so the end of the turn is not sampled."""


async def play_game(agent: openai.AsyncOpenAI, model: str, seed: str) -> tuple[Game, ChatCompletion]:
    """Play the game of `seed` with an agent's client. Returns it with the last answer. Raises `openai.APIError`."""
    game = Game(seed)
    messages: list[ChatCompletionMessageParam] = []
    while game.result is None:
        messages.append({"role": "user", "content": describe(game.board)})
        answer = await agent.chat.completions.create(
            model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=1.0
        )
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        game.play(text)
    return game, answer


async def play(agent: openai.AsyncOpenAI, run: Trajectory, seed: str) -> Game:
    """Play the game of `seed` as a run.

    Raises `openai.APIError` if a call failed: the run has no result then, so that a failure of infrastructure never
    counts as a lost game."""
    game, _ = await play_game(agent, run.model, seed)
    run.metrics = {"win": float(game.result == "win"), "moves": float(game.moves)}
    run.metadata = {"result": game.result, "board": game.board}
    return game
