"""Environments of the package verifiers (0.1 to 0.3.0, the extra `verifiers`).

Each row of an environment's dataset is a task. Its rubric gives the reward, and its functions are the metrics.
Scores that compare the attempts of a group with each other are refused: each attempt is played and scored alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import openai

from journeywork.environments.scenarios import Scenario, ScenarioError, numbers
from journeywork.trajectory import Trajectory

_EMPTY = "EmptyModelResponseError"
"""An error to verifiers. It is the policy that ended its reply at once, so the attempt keeps its reward (0)."""


class VerifiersScenarios:
    """An environment that `verifiers.load_environment` finds."""

    def __init__(self, name: str, arguments: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        """`arguments` are those of the environment's `load_environment`, `sampling` those of each model call.

        Raises `ScenarioError` if verifiers or the environment is not installed."""
        try:
            verifiers: Any = importlib.import_module("verifiers")
            if not hasattr(verifiers, "load_environment"):
                raise ScenarioError(
                    f"verifiers {getattr(verifiers, '__version__', '')} is installed, which has tasksets and harnesses "
                    "in place of `load_environment`; 0.1.12 to 0.3.0 are supported: "
                    "pip install './journeywork[verifiers]'"
                )
            clients: Any = importlib.import_module("verifiers.clients")
        except ImportError as error:
            raise ScenarioError(
                f"verifiers 0.1.12 to 0.3.0 is not installed ({error}): pip install './journeywork[verifiers]'"
            ) from error
        try:
            self._environment: Any = verifiers.load_environment(name, **arguments)
        except (ImportError, ValueError, RuntimeError, AttributeError) as error:
            raise ScenarioError(f"verifiers cannot load the environment {name!r}: {error}") from error
        if getattr(self._environment, "requires_group_rollouts", False):
            raise ScenarioError(
                f"{name}: its rubric compares attempts with each other; such rubrics are not supported"
            )
        self._make_client, self._sampling = clients.OpenAIChatCompletionsClient, dict(sampling)
        self._name = name

    def tasks(self, held_out: bool, limit: int) -> list[Scenario]:
        """Return rows of the dataset, or of the evaluation dataset."""
        environment = self._environment
        read = environment.get_eval_dataset if held_out else environment.get_dataset
        rows = read(n=limit).to_list()
        return [Scenario(f"{self._name}-{row['example_id']}", _text(row.get("prompt")), row) for row in rows]

    async def play(self, run: Trajectory, task: Scenario) -> float | None:
        """Play one row. Raises `ScenarioError` if the environment reports an error, so that it is no reward."""
        async with openai.AsyncOpenAI(**run.openai) as agent:
            found = await self._environment.run_rollout(
                dict(task.data), self._make_client(agent), run.model, self._sampling
            )
        error = found.get("error")
        empty = bool(error) and _EMPTY in str(error)
        if error and not empty:
            raise ScenarioError(f"{task.id}: {error}")
        run.metrics.update({**numbers(found.get("metrics")), "empty_reply": float(empty)})
        run.metadata["stop_condition"] = str(found.get("stop_condition") or "")
        reward = found.get("reward")
        return None if reward is None else float(reward)


def _text(prompt: Any) -> str:
    """Return the last message of a prompt."""
    if isinstance(prompt, list) and prompt:
        last = prompt[-1]
        content = last.get("content") if isinstance(last, dict) else getattr(last, "content", "")
        return content if isinstance(content, str) else ""
    return prompt if isinstance(prompt, str) else ""
