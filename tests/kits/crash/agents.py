"""Agents that work while services die: they know nothing but HTTP, and repeat what was not answered."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx

from pipeline.config import Config

SEED = 20261121
GROUP, TURNS, LANES = 2, 2, 4
"""Attempts of a group, calls of an attempt, groups that are played at the same time."""


class Agents:
    """Agents in groups, with two turns each. They repeat every call until it is answered."""

    def __init__(self, url: str, client: httpx.AsyncClient, log: Path) -> None:
        """`log`: where the gateway says what "internal error" was."""
        self._url, self._client, self._log = url, client, log
        self.rng = random.Random(SEED + 1)
        self.replies: dict[tuple[str, int], str] = {}
        """(trajectory, turn) to the id of the reply that the agent got."""
        self.finished: dict[str, float] = {}
        """Reward that was reported with each finished run."""
        self.signals: dict[tuple[str, int], float] = {}
        """(trajectory, call) to the number that was given as feedback; call -1: on the whole run."""
        self.stopping = False
        self.repeated = 0

    async def post(self, path: str, body: dict[str, Any], key: str = "none") -> dict[str, Any]:
        tries = 0
        while True:
            # What openai's clients send with a repeated request.
            headers = {"authorization": f"Bearer {key}", "x-stainless-retry-count": str(tries)}
            try:
                reply = await self._client.post(f"{self._url}{path}", json=body, headers=headers)
            except httpx.TransportError:
                reply = None
            if reply is not None and reply.status_code < 300:
                answer: dict[str, Any] = reply.json()
                return answer
            # The gateway is dead, has no log for the moment, or paces.
            if reply is not None and reply.status_code not in (429, 502, 503):
                failures = [line for line in self._log.read_text().splitlines() if "a request failed" in line]
                raise AssertionError(f"{reply.text} {failures[-3:]}")
            tries += 1
            self.repeated += 1
            await anyio.sleep(0.05)

    async def work(self, lane: int) -> None:
        index = 0
        while not self.stopping:
            async with anyio.create_task_group() as tg:
                for attempt in range(GROUP):
                    tg.start_soon(self.run, f"g{lane}.{index}", attempt)
            index += 1

    async def run(self, group: str, attempt: int) -> None:
        name = f"{group}-{attempt}"
        # Now and then an event that exceeds the payload limit.
        padding = {"user": "x" * 40_000} if self.rng.random() < 0.1 else {}
        opened = await self.post("/v1/trajectories", {"model": "tiny", "group": group, "attempt": attempt, "id": name})
        messages: list[dict[str, str]] = [{"role": "user", "content": group}]
        for turn in range(TURNS):
            body = {"model": "tiny", "messages": messages, "max_tokens": 3, **padding}
            reply = await self.post(f"/t/{name}/v1/chat/completions", body, opened["api_key"])
            self.replies[name, turn] = reply["id"]
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "and?"}]
        # One group in eight has equal rewards: it is discarded.
        reward = 0.5 if self.rng.random() < 0.1 else attempt + self.rng.random()
        early = self.rng.random() < 0.5
        if early:
            await self.grade(name, reward)
        await self.post(f"/v1/trajectories/{name}/complete", {"reward": reward})
        self.finished[name] = reward
        if not early:
            await self.grade(name, reward)

    async def grade(self, name: str, reward: float) -> None:
        """Give feedback on a run by the id of its last answer, and on the first call of some runs."""
        about = {-1: reward} | ({0: reward / 2} if reward > 1.5 else {})
        for call, value in about.items():
            self.signals[name, call] = value
            answer = {"answer": self.replies[name, max(call, 0)], "about": "run" if call < 0 else "call"}
            await self.post("/v1/feedback", {**answer, "name": "grade", "value": value, "key": f"{name}.{call}"})


@asynccontextmanager
async def working(config: Config) -> AsyncIterator[Agents]:
    """Let agents work while the block runs; at its end they finish what they began."""
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        made = Agents(f"http://127.0.0.1:{config.gateway.port}", client, config.path("gateway.log"))
        async with anyio.create_task_group() as tg:
            for lane in range(LANES):
                tg.start_soon(made.work, lane)
            yield made
            made.stopping = True
