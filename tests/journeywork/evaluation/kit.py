"""A rollout and tasks that `journeywork eval` loads by name."""

import os
import subprocess
import sys
from typing import Any

import openai

NONE: list[str] = []
TASKS = ["a1=x", "a1=o b2=x", "c3=o"]


def held_out() -> list[str]:
    return TASKS


async def play(run: Any, task: str) -> float:
    async with openai.AsyncOpenAI(**run.openai) as agent:
        reply = await agent.chat.completions.create(
            model=run.model, max_tokens=5, messages=[{"role": "user", "content": task}]
        )
    text = reply.choices[0].message.content or ""
    run.metrics["short"] = float(len(text) < 40)
    return len(text) / 100


def chatter(run: Any, task: str) -> float:
    """Play, and print in the three ways that there are."""
    print(f"playing {task}")  # noqa: T201
    os.write(1, b"from a library\n")
    subprocess.run([sys.executable, "-c", "print('from a program')"], check=True)
    return 1.0


async def forget(run: Any, task: str) -> None:
    """Play without a reward."""
