"""The held-out games, for the demo and for `journeywork eval`:

    journeywork eval tictactoe@0 tictactoe --rollout examples.tictactoe.held_out:play \\
      --scenarios examples.tictactoe.held_out:batches

A task is a batch of games. All moves of a round are one call: the same inference as one call for each game, with far
fewer requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypedDict

import openai

from examples.tictactoe.agent import MAX_TOKENS
from examples.tictactoe.game import REWARDS, Game, describe, opening_seed
from journeywork import Trajectory

GAMES = 2000
BATCH = 40
"""Games in one trajectory, and so in one call. An event holds its whole request, so the log grows with the square."""
AT_ONCE = 4
"""Number of such trajectories at once in the demo."""


class Batch(TypedDict):
    """A task: held-out games that are played together."""

    id: str
    seeds: list[str]


def batches(games: int = GAMES) -> list[Batch]:
    """Return the first `games` held-out games, the same for every run, in batches: at least ten, so that the
    interval of their mean is useful."""
    size = max(min(BATCH, games // 10), 1)
    tasks: list[Batch] = []
    for first in range(0, games, size):
        numbers = range(first, min(first + size, games))
        seeds = [opening_seed("val", number) for number in numbers]
        tasks.append({"id": f"{seeds[0]}-{numbers[-1]}", "seeds": seeds})
    return tasks


def prompt(messages: Iterable[Mapping[str, str]]) -> str:
    """Return the conversation in the model's chat template, ready for the model's next turn."""
    return "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages) + "<|assistant|>"


async def play(run: Trajectory, batch: Batch) -> float:
    """Play a batch, set the shares of games that ended each way as metrics, and return the mean reward."""
    games = await play_together(run, batch["seeds"])
    for result in REWARDS:
        run.metrics[result] = sum(game.result == result for game in games) / len(games)
    run.metrics["games"] = len(games)
    return sum(game.reward for game in games) / len(games)


async def play_together(run: Trajectory, seeds: list[str]) -> list[Game]:
    """Play games, all moves of a round in one call. Returns them in the order of `seeds`.

    Raises `openai.APIError` if a call fails: then no game of the batch counts."""
    games = [Game(seed) for seed in seeds]
    talks: list[list[dict[str, str]]] = [[] for _ in games]
    async with openai.AsyncOpenAI(**run.openai) as agent:
        while unfinished := [i for i, game in enumerate(games) if game.result is None]:
            for i in unfinished:
                talks[i].append({"role": "user", "content": describe(games[i].board)})
            reply = await agent.completions.create(
                model=run.model, prompt=[prompt(talks[i]) for i in unfinished], max_tokens=MAX_TOKENS, temperature=1.0
            )
            for i, choice in zip(unfinished, sorted(reply.choices, key=lambda c: c.index), strict=True):
                talks[i].append({"role": "assistant", "content": choice.text})
                games[i].play(choice.text)
    return games
