"""Trains an agent on 2048 and compares it with its base model on held-out games.

    python -m examples.twentyfortyeight.train --seed 0 --run-dir runs/twentyfortyeight-0

Starts the whole installation, plays groups of games while the trainer learns from them, and then plays the same
held-out games with the base model and the last version."""

from __future__ import annotations

import anyio
from openai.types.chat import ChatCompletionMessageParam

from examples.common import curve, running
from examples.twentyfortyeight.game import RULES, Game, describe
from journeywork import Trajectory

MODEL = "twentyfortyeight"
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
FULL_SCORE = 50
"""Points that count as a reward of 1; the best play of ten moves earns about as many."""


async def play(run: Trajectory, seed: str) -> float:
    """Play the game of this seed; its reward is dense: every merge adds its points."""
    agent = running.agent(run)
    game = Game(seed)
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": RULES}]
    while not game.over:
        messages.append({"role": "user", "content": describe(game.board)})
        reply = await agent.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=1, temperature=1.0
        )
        move = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": move})
        game.play(move.strip().lower())
    run.metrics = {"points": game.points, "moves": game.moves, "largest tile": max(game.board)}
    return game.points / FULL_SCORE


async def main() -> None:
    args = running.arguments(__doc__, MODEL, steps=30, held_out=200, base=BASE)
    async with running.installation(args, {}) as client:
        compared = await running.train_and_compare(
            client, args, lambda n: f"train/{args.seed}/{n}", play, lambda n: f"held-out/{n}"
        )
    curve.report(args, compared)


if __name__ == "__main__":
    anyio.run(main)
