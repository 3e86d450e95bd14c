"""Trajectories of agents that know nothing of trajectories: found by the continuity of their messages.

A call whose messages begin with all that a run had said and been answered so far goes on with that run. Any other call
begins one, in the group of its first user turn. A run without a call for `idle_s` is complete. Opt-in
(`gateway.detection.enabled`), because two runs that have said exactly the same can't be told apart: which goes on as which is then
arbitrary, and harmless, since up to there they are equal.

A gateway that starts takes over the inferred runs that the log holds open: what was said so far is in their last
exchange, so a run goes on across the restart, and one that does not is completed when it has been silent for long enough.
Where gateways share a log, each knows what it served and what it took over: route an agent's calls to one of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import msgspec

from pipeline.config import GatewayConfig
from pipeline.events import TrajectoryOpened
from pipeline.log.broker import BrokerError
from pipeline.names import InvalidNameError, new_id
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.runs import Trajectory
from rollout_gateway.capture.trajectories import Completion, Registry
from rollout_gateway.dialects.calls import Answer, Call
from rollout_gateway.http.errors import ApiError

log = get_logger("rollout_gateway.capture.detection")

_CHECK_S = 1.0
_PREFIX = "i"


class Inference:
    """The runs that are being inferred."""

    def __init__(self, project: str, registry: Registry, config: GatewayConfig) -> None:
        self._project, self._registry = project, registry
        self._idle_s, self._outcome = config.detection.idle_s, config.detection.outcome
        # A run of another gateway may have a call in flight that only its end will show.
        self._taken_over_idle_s = config.detection.idle_s + config.replicas.timeout_s
        self._states: dict[bytes, list[Trajectory]] = {}
        """What was said up to a run's last answer, to the runs of which that holds."""
        self._state_of: dict[str, bytes] = {}
        self._runs: dict[str, Trajectory] = {}
        self._taken_over: set[str] = set()
        """Runs of before this gateway's start that have not been called since."""
        self._rebuilt = asyncio.Event()

    async def find(self, call: Call, model: str, owner: str = "") -> Trajectory:
        """The run that this call goes on with, or a new one. `owner` names the caller's key: a run goes on with calls of the
        key that began it."""
        await self._rebuilt.wait()
        messages = _messages(call)
        for state in reversed(_states(f"{owner}\0{model}", messages[:-1])):
            for trajectory in self._states.get(state, ()):
                if not trajectory.in_flight and not trajectory.completing:
                    self._forget_state(trajectory)
                    self._taken_over.discard(trajectory.id)
                    return trajectory
        first = next((m for m in messages if m[0] == "user"), messages[0] if messages else ("", "", ""))
        group = hashlib.sha256(msgspec.msgpack.encode((model, first))).hexdigest()[:20]
        event = TrajectoryOpened(
            project=self._project,
            trajectory=new_id(_PREFIX),
            model=model,
            group=f"i-{group}",
            metadata=b'{"inferred":true}',
            owner=owner,
        )
        trajectory = await self._registry.open(event, "")
        self._runs[trajectory.id] = trajectory
        return trajectory

    def answered(self, trajectory: Trajectory, call: Call, answer: Answer) -> None:
        """A call of an inferred run was answered: the run's next call begins with this."""
        if trajectory.id not in self._runs or not answer.choices:
            return
        said = msgspec.json.decode(answer.choices[0].fields.get("message", msgspec.Raw(b"{}")))
        self._note(trajectory, _messages(call), said)

    def _note(self, trajectory: Trajectory, messages: list[Canonical], said: dict[str, Any]) -> None:
        opened = trajectory.opened
        state = _states(f"{opened.owner}\0{opened.model}", [*messages, _canonical(said)])[-1]
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

    # -- runs that end --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """For ever: take over what the log holds open, then complete the runs that go silent."""
        await self._rebuild()
        self._rebuilt.set()
        while True:
            await asyncio.sleep(min(_CHECK_S, self._idle_s / 2))
            now = time.monotonic()
            for trajectory in list(self._runs.values()):
                taken_over = trajectory.id in self._taken_over
                patience = self._taken_over_idle_s if taken_over else self._idle_s
                if not trajectory.in_flight and trajectory.used_at < now - patience:
                    await self._complete(trajectory)

    async def _rebuild(self) -> None:
        while True:
            try:
                names = await self._registry.unfinished(f"{_PREFIX}-")
                break
            except BrokerError as error:
                log.warning("inferred runs wait for the log", error=str(error))
                await asyncio.sleep(_CHECK_S)
        for name in names:
            try:
                trajectory = await self._registry.find(name)
                if not msgspec.json.decode(bytes(trajectory.opened.metadata)).get("inferred"):
                    continue
                said = await self._registry.last_answer(trajectory)
            except (ApiError, BrokerError, InvalidNameError) as error:
                log.warning("an inferred run was not taken over", trajectory=name, error=str(error))
                continue
            self._runs[name] = trajectory
            self._taken_over.add(name)
            if said is not None:
                request = msgspec.json.decode(said.request)
                (choice,) = msgspec.json.decode(said.response)["choices"]
                self._note(trajectory, _canonicals(request.get("messages")), choice.get("message") or {})
        log.info("inferred runs taken over", runs=len(self._runs))

    async def _complete(self, trajectory: Trajectory) -> None:
        try:
            if trajectory.id in self._taken_over and await self._registry.refresh(trajectory):
                trajectory.used_at = time.monotonic()  # another gateway goes on with it
                return
            await self._registry.complete(trajectory.id, Completion(outcome=self._outcome, inferred=True))
        except BrokerError as error:
            log.warning("an inferred run is completed later", trajectory=trajectory.id, error=str(error))
            return
        except ApiError as error:
            log.warning("an inferred run was not completed", trajectory=trajectory.id, error=error.message)
        self._forget_state(trajectory)
        self._taken_over.discard(trajectory.id)
        self._runs.pop(trajectory.id, None)


Canonical = tuple[str, str, str]
"""Role, text, tool calls: what clients keep of a message when they send it back. Arguments of calls are compared as the JSON
that they are, since clients parse them and write them again in their own way."""


def _messages(call: Call) -> list[Canonical]:
    raw = call.fields.get("messages")
    return _canonicals(msgspec.json.decode(raw) if raw is not None else [])


def _canonicals(messages: Any) -> list[Canonical]:
    return [_canonical(m) for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []


def _canonical(message: dict[str, Any]) -> Canonical:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))
    calls = [
        (f.get("name"), _arguments(f.get("arguments")))
        for c in message.get("tool_calls") or ()
        if isinstance(c, dict) and isinstance(f := c.get("function"), dict)
    ]
    return (
        str(message.get("role")),
        str(content or ""),
        msgspec.json.encode(calls, order="sorted").decode() if calls else "",
    )


def _arguments(sent: Any) -> Any:
    """The arguments of a tool call: parsed where they are JSON, else as they are. Clients send none as `""` or `{}`."""
    if not isinstance(sent, str):
        return _numbers(sent) or {}
    try:
        return _numbers(msgspec.json.decode(sent)) or {} if sent.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return sent


def _numbers(value: Any) -> Any:
    """JSON with whole numbers as such: JavaScript writes 1.0 as 1."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _states(whose: str, messages: list[Canonical]) -> list[bytes]:
    """A hash of the first message, of the first two, and so on; each of `whose`, a key and a model."""
    digest = hashlib.sha256(whose.encode())
    out = []
    for message in messages:
        digest.update(msgspec.msgpack.encode(message))
        out.append(digest.digest())
    return out
