"""An agent that plays one game, and a fleet of agents. They use an OpenAI client and no code of Journeywork.

Three kinds of call make these agents trainable: opening a trajectory, which names the group of the run and returns a
base URL; chat completions at that URL; and completing the trajectory with its reward. A request that fails after all
retries is counted in `Fleet.failed`, and its run is completed as `no_result`, so that a failure of infrastructure
never counts as a lost game.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam

from examples.tictactoe.game import Game, Result, describe

MAX_TOKENS = 1
"""A cell's name is one token and a complete move, so the end of the turn is not sampled."""


@dataclass(frozen=True)
class Finished:
    """A game that ended. `step` is the policy step that made its last move. `result` is `None` if a call was not
    answered."""

    id: str
    group: str
    result: Result | None
    reward: float
    step: int


@dataclass
class Fleet:
    """Agents on one connection pool, `concurrency` games at once at most."""

    client: openai.AsyncOpenAI
    model: str
    concurrency: int = 24
    """Games at once. httpx's pool needs more CPU time per call with more connections: 4 ms at 16, 11 ms at 64."""
    calls: int = 0
    failed: int = 0
    """Requests that failed after the client's own retries."""
    last_error: str = ""
    latency_s: float = 0.0
    """Seconds, summed over all calls."""
    completed: list[str] = field(default_factory=list)
    """Ids of the trajectories that were completed."""

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.concurrency)

    @classmethod
    def at(cls, gateway: str, model: str, concurrency: int = 24) -> Fleet:
        """A fleet for the gateway at this URL; close it with `await fleet.client.close()`."""
        client = openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="none", max_retries=12, timeout=120)
        return cls(client, model, concurrency)

    async def play_all(
        self, seeds: Iterable[str], *, group: str, split: str = "train", pinned: str = ""
    ) -> list[Finished]:
        """Play one game per seed concurrently, as the members of one group. Returns games in the order of `seeds`."""
        listed = list(seeds)
        async with asyncio.TaskGroup() as tasks:
            games = [
                tasks.create_task(
                    self.play(seed, group=group, attempt=i, size=len(listed), split=split, pinned=pinned)
                )
                for i, seed in enumerate(listed)
            ]
        return [game.result() for game in games]

    async def play(
        self,
        seed: str,
        *,
        group: str,
        attempt: int = 0,
        size: int = 0,
        split: str = "train",
        pinned: str = "",
    ) -> Finished:
        """Play the game of `seed` from opening to completing its trajectory."""
        async with self._slots:
            game, step = Game(seed), 0
            run = await self._post(
                "/trajectories",
                {
                    "model": self.model,
                    "id": f"{group}-{attempt}",
                    "group": group,
                    "group_size": size,
                    "attempt": attempt,
                    "task": seed,
                    "split": split,
                    "pinned": pinned,
                },
            )
            if run is None:
                return Finished(f"{group}-{attempt}", group, None, 0.0, 0)
            agent = self.client.with_options(base_url=run["base_url"], api_key=run["api_key"])
            messages: list[ChatCompletionMessageParam] = []
            while game.result is None:
                messages.append({"role": "user", "content": describe(game.board)})
                began = time.monotonic()
                try:
                    reply = await agent.chat.completions.create(
                        model=self.model, messages=messages, max_tokens=MAX_TOKENS, temperature=1.0
                    )
                except openai.APIError as error:
                    self._note(error)
                    break
                self.calls += 1
                self.latency_s += time.monotonic() - began
                step = int(reply.model.rpartition("@")[2])
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                game.play(text)
            return await self._complete(run["id"], group, game, step)

    async def _complete(self, trajectory: str, group: str, game: Game, step: int) -> Finished:
        if game.result is None:
            body: dict[str, Any] = {"outcome": "no_result"}
        else:
            won = float(game.result == "win")
            body = {
                "reward": game.reward,
                "metrics": {"win": won, "moves": float(game.moves)},
                "metadata": {"result": game.result, "board": game.board},
            }
        if await self._post(f"/trajectories/{trajectory}/complete", body) is not None:
            self.completed.append(trajectory)
        reward = 0.0 if game.result is None else game.reward
        return Finished(trajectory, group, game.result, reward, step)

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Call the gateway's control API with the same client. Returns `None` and counts the failure if all retries
        fail."""
        try:
            return await self.client.post(path, cast_to=object, body=body)
        except openai.APIError as error:
            self._note(error)
            return None

    def _note(self, error: openai.APIError) -> None:
        self.failed += 1
        self.last_error = f"{type(error).__name__}: {error}"
