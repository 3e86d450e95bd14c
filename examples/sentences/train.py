"""Trains a model to write sentences under rules, rewarded by a Python function, and compares it with its base model.

    python -m examples.sentences.train --seed 0 --run-dir runs/sentences-0

The agents report no reward: the judge calls `examples.sentences.reward:keeps_rules` for each run, in a sandbox."""

from __future__ import annotations

import anyio

from examples.common import curve, running
from examples.sentences.reward import score
from examples.sentences.tasks import task
from journeywork import Trajectory

MODEL = "sentences"
BASE = None  # the tiny model of make_model; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
SETTINGS = {
    "judge.rewards": [{"name": "rules", "kind": "python", "entry": "examples.sentences.reward:keeps_rules"}],
}


async def reply(run: Trajectory, seed: str) -> str:
    """Ask the model for the sentence of this seed's task."""
    agent = running.agent(run)
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


async def main() -> None:
    args = running.arguments(__doc__, MODEL, steps=40, held_out=400, base=BASE)
    async with running.installation(args, SETTINGS) as client:
        compared = await running.train_and_compare(
            client, args, lambda n: f"train/{args.seed}/{n}", write, lambda n: f"held-out/{n}", write_held_out,
            describe=task,
        )  # fmt: skip
    curve.report(args, compared)


if __name__ == "__main__":
    anyio.run(main)
