"""Trains a model to write sentences under rules, rewarded by a Python function, and compares it with its base model.

    python -m examples.sentences.train --seed 0 --run-dir runs/sentences-0

The agents report no reward: the judge calls `examples.sentences.reward:keeps_rules` for each run, in a sandbox."""

from __future__ import annotations

import argparse

import anyio
import openai

from examples.common import curve, running
from examples.sentences.reward import score
from examples.sentences.tasks import task
from journeywork import AsyncJourneywork, Trajectory

MODEL = "sentences"
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
GROUP_SIZE = 8
GROUPS_PER_STEP = 8
CONCURRENCY = 32
SETTINGS = {
    "judge.group_size": GROUP_SIZE,
    "judge.rewards": [{"name": "rules", "kind": "python", "entry": "examples.sentences.reward:keeps_rules"}],
    "trainer.groups_per_step": GROUPS_PER_STEP,
    "gateway.max_groups_ahead": 3 * GROUPS_PER_STEP,
}

CLIENT = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=8, timeout=120)
"""One pool of connections for all agents."""


async def reply(run: Trajectory, seed: str) -> str:
    """Ask the model for the sentence of this seed's task."""
    agent = CLIENT.with_options(base_url=run.base_url, api_key=run.api_key)
    answer = await agent.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": task(seed)}], max_tokens=10, temperature=1.0
    )
    return answer.choices[0].message.content or ""


async def write(run: Trajectory, seed: str) -> None:
    """A training run: its reward is the judge's."""
    await reply(run, seed)


async def write_held_out(run: Trajectory, seed: str) -> float:
    """A held-out run, scored here so that `compare` knows its reward."""
    return score(task(seed), await reply(run, seed))


async def learn(client: AsyncJourneywork, args: argparse.Namespace) -> None:
    """Write groups of sentences until the last step is served; the trainer trains beside."""
    batch = 0
    while await running.served_step(client, MODEL) < args.steps:
        seeds = [f"train/{args.seed}/{batch}/{n}" for n in range(GROUPS_PER_STEP)]
        await client.gather(
            MODEL, seeds, write, group_size=GROUP_SIZE, concurrency=CONCURRENCY, describe=task
        )
        batch += 1


async def main() -> None:
    args = running.arguments(__doc__, MODEL, steps=40, held_out=400, base=BASE)
    async with running.installation(args, SETTINGS) as client:
        await learn(client, args)
        held_out = [f"held-out/{n}" for n in range(args.held_out)]
        last = f"{MODEL}@{args.steps}"
        compared = await client.compare(
            f"{MODEL}@0", last, held_out, write_held_out, concurrency=CONCURRENCY, describe=task
        )
    curve.report(args, compared)


if __name__ == "__main__":
    anyio.run(main)
