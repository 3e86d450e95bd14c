"""A rollout and tasks that `journeywork eval` loads by name."""

from __future__ import annotations

from typing import Any

import openai

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


async def forget(run: Any, task: str) -> None:
    """Play without a reward."""
