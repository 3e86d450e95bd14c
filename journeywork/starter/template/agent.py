"""An agent that adds numbers, and its training.

    python agent.py --passes 20        # play the training tasks while the model behind the gateway learns
    journeywork eval starter_model@0 starter_model --rollout agent:play --scenarios agent:held_out

Replace `Task`, `training`, `held_out`, `reward` and `play` by those of your own agent.
"""

from __future__ import annotations

import argparse
import os
import random
import re
from dataclasses import dataclass

from openai import AsyncOpenAI

from journeywork import Journeywork, Trajectory

MODEL = "starter_model"
URL = os.environ.get("JOURNEYWORK_URL") or "http://127.0.0.1:8700"


@dataclass(frozen=True)
class Task:
    """One sum. Attempts at the same task are compared with each other."""

    id: str
    question: str
    answer: int


SUMS = [Task(f"{a}+{b}", f"{a}+{b}=", a + b) for a in range(100) for b in range(100)]
random.Random("held-out").shuffle(SUMS)
HELD_OUT = 200


def training(number: int) -> list[Task]:
    """The tasks of one pass, drawn anew for every pass."""
    return random.Random(f"train-{number}").sample(SUMS[HELD_OUT:], 16)


def held_out() -> list[Task]:
    """Tasks that are never trained on."""
    return SUMS[:HELD_OUT]


def reward(text: str, task: Task) -> float:
    """1 for the right sum, up to 0.5 for one that is near, 0 for a reply without a number."""
    number = re.search(r"\d+", text)
    if number is None:
        return 0.0
    distance = abs(int(number[0][:6]) - task.answer)
    return 1.0 if distance == 0 else 0.5 / (1 + distance / 10)


async def play(run: Trajectory, task: Task) -> float:
    """One attempt: call the model as often as you like, with any OpenAI client, and return the reward."""
    async with AsyncOpenAI(**run.openai) as client:
        reply = await client.chat.completions.create(
            model=run.model, max_tokens=16, messages=[{"role": "user", "content": task.question}]
        )
    text = reply.choices[0].message.content or ""
    score = reward(text, task)
    run.metrics["right"] = float(score == 1.0)
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the agent.")
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--url", default=URL)
    args = parser.parse_args()
    with Journeywork(args.url) as journeywork:
        for number in range(args.passes):
            groups = journeywork.gather(MODEL, training(number), play, group_size=8)
            rewards = [value for group in groups for value in group.rewards]
            (version,) = (p["version"] for p in journeywork.policies() if p["model"] == MODEL)
            print(f"pass {number}: mean reward {sum(rewards) / max(len(rewards), 1):.3f}, now serving {version}")


if __name__ == "__main__":
    main()
