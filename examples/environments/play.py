"""Plays a verifiers environment with a policy of a running gateway until its last step is trained.

`examples.environments.demo` starts it in the Python environment that has verifiers. It reads the recipe as JSON from
standard input, and prints a line of JSON: the number of episodes, and the mean reward of the first and last step's.
Where the recipe has `examples`, it plays nothing, and prints so many right conversations.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from statistics import fmean
from typing import Any

import anyio
import verifiers.v1 as verifiers
from verifiers.v1.utils.loaders import resolve_env_config

from journeywork import AsyncJourneywork, LoopOptions, Trajectory, loop


def environment(recipe: dict[str, Any]) -> verifiers.Env:
    """Return the environment of a recipe. Its agent is a plain loop of chat completions in this process."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    tasks = {"id": recipe["name"], **recipe["taskset"]}
    return verifiers.load_environment(resolve_env_config({"taskset": tasks, recipe["agent"]: agent}))


async def train(recipe: dict[str, Any]) -> None:
    """Play episodes until the gateway serves the recipe's last step."""
    env = environment(recipe)
    rewards: list[float] = []

    async def episode(run: Trajectory, task: Any) -> float:
        """Play a task by the calls of `run`. Returns its reward. Raises `RuntimeError` if the episode failed."""
        os.environ[run.id] = run.api_key  # verifiers reads keys from variables only
        try:
            client = verifiers.EvalClientConfig(base_url=run.base_url, api_key_var=run.id)
            sampling = verifiers.Sampling(max_tokens=recipe["max_tokens"], temperature=1.0)
            played = await env.run_episode(task, verifiers.ModelContext(run.model, client, sampling))
        finally:
            del os.environ[run.id]
        if not played.ok:
            raise RuntimeError(played.errors or [trace.errors for trace in played.traces])
        (trace,) = played.traces
        run.metrics.update(trace.metrics)
        rewards.append(trace.reward)
        return float(trace.reward)

    tasks = list(itertools.islice(env.taskset.load(), recipe["steps"] * recipe["groups_per_step"] * 2))
    options: LoopOptions[Any] = LoopOptions(
        recipe["name"],
        steps=recipe["steps"],
        groups_per_step=recipe["groups_per_step"],
        group_size=recipe["group_size"],
        describe=lambda task: f"{recipe['name']} {task.data.idx}",
    )
    async with env.serving(), AsyncJourneywork(recipe["gateway"]) as client:
        await loop(client, recipe["name"], tasks, episode, options)
    of_step = recipe["groups_per_step"] * recipe["group_size"]
    shares = {"first_step": rewards[:of_step], "last_step": rewards[-of_step:]}
    print(json.dumps({"episodes": len(rewards)} | {name: fmean(part) for name, part in shares.items()}), flush=True)


def solutions(recipe: dict[str, Any], count: int) -> list[list[dict[str, str]]]:
    """Return right conversations of the environment's first tasks, for a warm start. The loop plays these tasks too.
    Empty for an environment whose right answers are not known here."""
    tasks = itertools.islice(environment(recipe).taskset.load(), count)
    if recipe["name"] == "reverse-text":
        return [
            [
                {"role": "system", "content": task.data.system_prompt},
                {"role": "user", "content": task.data.prompt},
                {"role": "assistant", "content": f"<reversed_text>{task.data.answer}</reversed_text>"},
            ]
            for task in tasks
        ]
    return []


if __name__ == "__main__":
    recipe = json.load(sys.stdin)
    if examples := recipe.get("examples"):
        print(json.dumps(solutions(recipe, examples)))
    else:
        anyio.run(train, recipe)
