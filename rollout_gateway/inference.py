"""Trajectories of agents that know nothing of trajectories: found by the continuity of their messages.

A call whose messages begin with all that a run had said and been answered so far goes on with that run. Any other call
begins one, in the group of its first user turn. A run without a call for `idle_s` is complete. Opt-in
(`gateway.infer`), because two runs that have said exactly the same can't be told apart: which goes on as which is then
arbitrary, and harmless, since up to there they are equal.

What is known of a run's messages is in memory only: after a restart its next call begins a new run, and the old one stays
open in the log and is never trained.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import msgspec

from pipeline.events import TrajectoryOpened
from pipeline.log import get_logger
from pipeline.names import new_id
from rollout_gateway.errors import ApiError
from rollout_gateway.trajectories import Completion, Registry, Trajectory
from rollout_gateway.wire import Answer, Call

log = get_logger("rollout_gateway.inference")

_CHECK_S = 1.0


class Inference:
    """The runs that are being inferred."""

    def __init__(self, project: str, registry: Registry, idle_s: float) -> None:
        self._project, self._registry, self._idle_s = project, registry, idle_s
        self._states: dict[bytes, list[Trajectory]] = {}
        """What was said up to a run's last answer, to the runs of which that holds."""
        self._state_of: dict[str, bytes] = {}
        self._runs: dict[str, Trajectory] = {}

    async def find(self, call: Call, model: str) -> Trajectory:
        """The run that this call goes on with, or a new one."""
        messages = _messages(call)
        for state in reversed(_states(model, messages[:-1])):
            for trajectory in self._states.get(state, ()):
                if not trajectory.in_flight and not trajectory.completing:
                    self._forget_state(trajectory)
                    return trajectory
        first = next((m for m in messages if m[0] == "user"), messages[0] if messages else ("", "", ""))
        group = hashlib.sha256(msgspec.msgpack.encode((model, first))).hexdigest()[:20]
        event = TrajectoryOpened(
            project=self._project,
            trajectory=new_id("i"),
            model=model,
            group=f"i-{group}",
            metadata=b'{"inferred":true}',
        )
        trajectory = await self._registry.open(event, "")
        self._runs[trajectory.id] = trajectory
        return trajectory

    def answered(self, trajectory: Trajectory, call: Call, answer: Answer) -> None:
        """A call of an inferred run was answered: the run's next call begins with this."""
        if trajectory.id not in self._runs or not answer.choices:
            return
        said = msgspec.json.decode(answer.choices[0].fields.get("message", msgspec.Raw(b"{}")))
        state = _states(trajectory.opened.model, [*_messages(call), _canonical(said)])[-1]
        self._forget_state(trajectory)
        self._states.setdefault(state, []).append(trajectory)
        self._state_of[trajectory.id] = state

    def _forget_state(self, trajectory: Trajectory) -> None:
        state = self._state_of.pop(trajectory.id, None)
        if state is not None:
            runs = self._states[state]
            runs.remove(trajectory)
            if not runs:
                del self._states[state]

    async def complete_idle(self) -> None:
        """For ever: complete the runs that went silent."""
        while True:
            await asyncio.sleep(min(_CHECK_S, self._idle_s / 2))
            silent = time.monotonic() - self._idle_s
            for trajectory in [t for t in self._runs.values() if not t.in_flight and t.used_at < silent]:
                await self._complete(trajectory)

    async def _complete(self, trajectory: Trajectory) -> None:
        try:
            await self._registry.complete(trajectory.id, Completion(inferred=True))
        except ApiError as error:
            log.warning("an inferred run was not completed", trajectory=trajectory.id, error=error.message)
        self._forget_state(trajectory)
        self._runs.pop(trajectory.id, None)


Canonical = tuple[str, str, str]
"""Role, text, tool calls: what clients keep of a message when they send it back."""


def _messages(call: Call) -> list[Canonical]:
    raw = call.fields.get("messages")
    decoded = msgspec.json.decode(raw) if raw is not None else []
    return [_canonical(m) for m in decoded if isinstance(m, dict)] if isinstance(decoded, list) else []


def _canonical(message: dict[str, Any]) -> Canonical:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    calls = [
        (f.get("name"), f.get("arguments"))
        for c in message.get("tool_calls") or ()
        if isinstance(c, dict) and isinstance(f := c.get("function"), dict)
    ]
    return (
        str(message.get("role")),
        str(content or ""),
        msgspec.json.encode(calls).decode() if calls else "",
    )


def _states(model: str, messages: list[Canonical]) -> list[bytes]:
    """A hash of the first message, of the first two, and so on."""
    digest = hashlib.sha256(model.encode())
    out = []
    for message in messages:
        digest.update(msgspec.msgpack.encode(message))
        out.append(digest.digest())
    return out
