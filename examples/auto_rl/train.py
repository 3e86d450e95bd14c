"""Trains a model for a task that one sentence describes, without data and without a reward.

    python -m examples.auto_rl.train --run-dir runs/auto_rl

A model writes scenarios for the sentence, the policy plays each of them several times, RULER compares the runs, and the
trainer learns from the scores. At the end the judge compares the base model and the last version on held-out scenarios.
With an OPENAI_API_KEY the model that writes and judges is $HELPER_MODEL; without one, a stand-in for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio

import journeywork.art as art
from examples.common import judged, running
from examples.support.desk import SYSTEM, score, ticket

TASK = SYSTEM
"""The sentence."""
BASE = None  # the tiny model of examples/support; a real one: BASE = "/models/Qwen3-4B-Instruct-2507"
MAX_TOKENS = 24
"""Of a reply. A real model needs more."""
LEARNING_RATE = 6e-3
"""For the tiny model; 1e-5 suits billions of parameters."""


async def play(model: art.TrainableModel[Any], scenario: str, version: str) -> art.Trajectory:
    """Let a version do a scenario. The reward is left to the judge."""
    messages: art.Messages = [{"role": "system", "content": TASK}, {"role": "user", "content": scenario}]
    reply = await model.openai_client().chat.completions.create(
        model=version, messages=messages, max_tokens=MAX_TOKENS, temperature=1.0
    )
    return art.Trajectory(messages_and_choices=[*messages, reply.choices[0]])


async def main() -> None:
    args = running.arguments(__doc__, "auto_rl", steps=12, held_out=24, base=BASE)
    written = [ticket(f"written/{n}").text for n in range(200)]
    async with judged.installation(args, "support", score, written) as (model, helper):
        scenarios = await helper.scenarios(TASK, 32 + args.held_out)
        await judged.train_and_compare(args, model, scenarios, partial(play, model), helper, LEARNING_RATE)


if __name__ == "__main__":
    anyio.run(main)
