"""Environments that an OpenEnv server offers (the extra `openenv`).

A task is a seed for the environment's reset. The model sees each observation as text and answers with the next action:
a JSON object with the action's fields, or the plain text of its only text field. The rewards of the steps are added up.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

import httpx
import openai

from journeywork.environments.scenarios import Scenario, ScenarioError, numbers
from journeywork.trajectory import Trajectory

_HIDDEN = ("done", "reward", "metadata")
_HELD_OUT_SEED = 1_000_000
"""Seeds from here on are held out."""


class OpenEnvScenarios:
    """An environment behind the URL of its server."""

    def __init__(
        self, url: str, *, system_prompt: str = "", action_field: str = "", max_steps: int = 20,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`action_field` is the field of the action that the reply fills; default: the action's only required text
        field, else the reply is a JSON object. Raises `ScenarioError` if openenv-core is not installed, or the server
        does not answer."""
        try:
            core: Any = importlib.import_module("openenv.core")
        except ImportError as error:
            raise ScenarioError(
                f"openenv-core is not installed ({error}): pip install './journeywork[openenv]'"
            ) from error
        self._client: Any = core.GenericEnvClient
        self._url, self._max_steps, self._sampling = url, max_steps, dict(sampling or {})
        self._action = _action_schema(url)
        self._field = action_field or _only_text(self._action)
        self._system = system_prompt or self._instruction()

    def _instruction(self) -> str:
        if self._field:
            return f"You act in an environment. Reply with the {self._field} of your next action and nothing else."
        fields = json.dumps(self._action.get("properties", {}))
        return f"You act in an environment. Reply with your next action: a JSON object with these fields: {fields}"

    def tasks(self, held_out: bool, limit: int) -> list[Scenario]:
        """Return seeds. Those for training and the held-out ones differ."""
        first = _HELD_OUT_SEED if held_out else 0
        return [Scenario(f"seed-{first + n}", f"seed {first + n}", {"seed": first + n}) for n in range(limit)]

    async def play(self, run: Trajectory, task: Scenario) -> float | None:
        """Play one episode. A reply that is no action ends it. Returns the sum of the steps' rewards."""
        messages: list[Any] = [{"role": "system", "content": self._system}]
        total, steps, malformed = 0.0, 0, False
        async with self._client(base_url=self._url) as environment, openai.AsyncOpenAI(**run.openai) as agent:
            result = await environment.reset(**task.data)
            while not result.done and steps < self._max_steps:
                messages.append({"role": "user", "content": _shown(result.observation)})
                reply = await agent.chat.completions.create(
                    model=run.model, messages=messages, **self._sampling
                )
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                action = self._as_action(text)
                if action is None:
                    malformed = True
                    break
                result = await environment.step(action)
                steps += 1
                total += float(result.reward or 0.0)
        run.metrics.update(numbers(result.observation.get("metadata")))
        run.metrics.update({"steps": float(steps), "done": float(result.done), "malformed": float(malformed)})
        return total

    def _as_action(self, text: str) -> dict[str, Any] | None:
        """Return the action of a reply, or `None` if it holds none."""
        if self._field:
            return {self._field: text.strip()}
        start, end = text.find("{"), text.rfind("}")
        try:
            found = json.loads(text[start : end + 1])
        except ValueError:
            return None
        return found if isinstance(found, dict) else None


def _action_schema(url: str) -> dict[str, Any]:
    """Return the JSON schema of the server's actions. Raises `ScenarioError`."""
    try:
        reply = httpx.get(f"{url.rstrip('/')}/schema", timeout=30)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()["action"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ScenarioError(f"{url} is no OpenEnv server: {error}") from error
    return found


def _only_text(schema: Mapping[str, Any]) -> str:
    """Return the action's only field apart from its metadata, if it is text; else an empty string."""
    fields = {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}
    if len(fields) != 1:
        return ""
    ((name, kind),) = fields.items()
    return name if kind.get("type") == "string" else ""


def _shown(observation: Mapping[str, Any]) -> str:
    """Return an observation as text: its only field if that is text, else JSON."""
    shown = {name: value for name, value in observation.items() if name not in _HIDDEN}
    if len(shown) == 1:
        (value,) = shown.values()
        if isinstance(value, str):
            return value
    return json.dumps(shown, default=str)
