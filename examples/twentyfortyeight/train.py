"""Trains an agent on 2048 and compares it with its base model on held-out games.

    python -m examples.twentyfortyeight.train --seed 0 --run-dir runs/twentyfortyeight-0

Starts the whole installation, plays groups of games while the trainer learns from them, and then plays the same
held-out games with the base model and the last version."""

from __future__ import annotations

import argparse

import anyio
import openai
from openai.types.chat import ChatCompletionMessageParam

from examples.common import curve, running
from examples.twentyfortyeight.game import RULES, Game, describe
from journeywork import AsyncJourneywork, Trajectory

MODEL = "twentyfortyeight"
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
GROUP_SIZE = 8
GROUPS_PER_STEP = 8
CONCURRENCY = 32
FULL_SCORE = 50
"""Points that count as a reward of 1; the best play of ten moves earns about as many."""
SETTINGS = {
    "judge.group_size": GROUP_SIZE,
    "trainer.groups_per_step": GROUPS_PER_STEP,
    "gateway.max_groups_ahead": 3 * GROUPS_PER_STEP,
}

CLIENT = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=8, timeout=120)
"""One pool of connections for all agents."""


async def play(run: Trajectory, seed: str) -> float:
    """Play the game of this seed; its reward is dense: every merge adds its points."""
    agent = CLIENT.with_options(base_url=run.base_url, api_key=run.api_key)
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


async def learn(client: AsyncJourneywork, args: argparse.Namespace) -> None:
    """Play groups of games until the last step is served; the trainer trains beside."""
    batch = 0
    while await running.served_step(client, MODEL) < args.steps:
        seeds = [f"train/{args.seed}/{batch}/{n}" for n in range(GROUPS_PER_STEP)]
        await client.gather(MODEL, seeds, play, group_size=GROUP_SIZE, concurrency=CONCURRENCY)
        batch += 1


async def main() -> None:
    args = running.arguments(__doc__, MODEL, steps=30, held_out=200, base=BASE)
    async with running.installation(args, SETTINGS) as client:
        await learn(client, args)
        held_out = [f"held-out/{n}" for n in range(args.held_out)]
        last = f"{MODEL}@{args.steps}"
        compared = await client.compare(f"{MODEL}@0", last, held_out, play, concurrency=CONCURRENCY)
    curve.report(args, compared)


if __name__ == "__main__":
    anyio.run(main)
