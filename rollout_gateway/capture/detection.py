"""Detects the trajectories of agents that name none, by the messages of their calls (opt-in:
`gateway.detection.enabled`).

A call whose messages begin with everything that a run had said and been answered so far belongs to that run. Any other
call begins a run, in the group of its first user message. A run without a call for `gateway.detection.idle_s` is
completed. Two runs that have said exactly the same can't be told apart; which of them a call continues is then
arbitrary, and harmless, since both are equal up to there.

A gateway that starts takes over the detected runs that the log holds open. Their last exchange says how they stand, so
a run goes on across the restart, or is completed once it has been silent for long enough. Gateways that share a log
detect runs independently: route the calls of one agent to one gateway.
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
from pipeline.names import InvalidNameError, new_dated_id
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.registry import Completion, Registry
from rollout_gateway.capture.trajectory import Trajectory
from rollout_gateway.dialects.calls import Answer, Call
from rollout_gateway.http.errors import ApiError

log = get_logger("rollout_gateway.capture.detection")

_CHECK_S = 1.0
_PREFIX = "i"
"""Ids of detected trajectories begin with it."""


class TrajectoryDetector:
    """The detected trajectories that are open."""

    def __init__(self, project: str, registry: Registry, config: GatewayConfig) -> None:
        self._project, self._registry = project, registry
        self._idle_s, self._outcome = config.detection.idle_s, config.detection.outcome
        # Another gateway may have a call of the run in flight, which shows only when it ends.
        self._taken_over_idle_s = config.detection.idle_s + config.replicas.timeout_s
        self._by_history: dict[bytes, list[Trajectory]] = {}
        """Runs that wait for their next call, by the hash of their messages up to the last answer."""
        self._history_of: dict[str, bytes] = {}
        self._open: dict[str, Trajectory] = {}
        self._taken_over: set[str] = set()
        """Runs from before this gateway's start that were not called since."""
        self._ready = asyncio.Event()

    async def find(self, call: Call, model: str, owner: str = "") -> Trajectory:
        """The run that this call continues, or a new one. A run continues only with calls of the key that began it,
        `owner`."""
        await self._ready.wait()
        messages = _messages(call)
        for history in reversed(_histories(owner, model, messages[:-1])):
            for trajectory in self._by_history.get(history, ()):
                if not trajectory.in_flight and not trajectory.completing:
                    self._forget_history(trajectory)
                    self._taken_over.discard(trajectory.id)
                    return trajectory
        first = next((m for m in messages if m[0] == "user"), messages[0] if messages else ("", "", ""))
        group = hashlib.sha256(msgspec.msgpack.encode((model, first))).hexdigest()[:20]
        event = TrajectoryOpened(
            project=self._project,
            trajectory=new_dated_id(_PREFIX),
            model=model,
            group=f"i-{group}",
            metadata=b'{"inferred":true}',
            owner=owner,
        )
        trajectory = await self._registry.open(event, "")
        self._open[trajectory.id] = trajectory
        return trajectory

    def answered(self, trajectory: Trajectory, call: Call, answer: Answer) -> None:
        """Note the answer of a detected run's call: the next call begins with it."""
        if trajectory.id in self._open and answer.choices:
            said = msgspec.json.decode(answer.choices[0].fields.get("message", msgspec.Raw(b"{}")))
            self._set_history(trajectory, [*_messages(call), *_canonicals([said])])

    def _set_history(self, trajectory: Trajectory, messages: list[Canonical]) -> None:
        history = _histories(trajectory.opened.owner, trajectory.opened.model, messages)[-1]
        self._forget_history(trajectory)
        self._by_history.setdefault(history, []).append(trajectory)
        self._history_of[trajectory.id] = history

    def _forget_history(self, trajectory: Trajectory) -> None:
        history = self._history_of.pop(trajectory.id, None)
        if history is not None:
            runs = self._by_history[history]
            runs.remove(trajectory)
            if not runs:
                del self._by_history[history]

    # -- completing ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take over the runs that the log holds open, then complete those that fall silent. Never returns."""
        await self._take_over()
        self._ready.set()
        while True:
            await asyncio.sleep(min(_CHECK_S, self._idle_s / 2))
            now = time.monotonic()
            for trajectory in list(self._open.values()):
                taken_over = trajectory.id in self._taken_over
                idle_s = self._taken_over_idle_s if taken_over else self._idle_s
                if not trajectory.in_flight and trajectory.used_at < now - idle_s:
                    await self._complete(trajectory)

    async def _take_over(self) -> None:
        while True:
            try:
                names = await self._registry.log.unfinished(f"{_PREFIX}-")
                break
            except BrokerError as error:
                log.warning("detected trajectories wait for the log", error=str(error))
                await asyncio.sleep(_CHECK_S)
        for name in names:
            try:
                trajectory = await self._registry.find(name)
                if not msgspec.json.decode(bytes(trajectory.opened.metadata)).get("inferred"):
                    continue
                last = await trajectory.last_answer()
            except (ApiError, BrokerError, InvalidNameError) as error:
                log.warning("detected trajectory not taken over", trajectory=name, error=str(error))
                continue
            self._open[name] = trajectory
            self._taken_over.add(name)
            if last is not None:
                messages = _canonicals(msgspec.json.decode(last.request).get("messages"))
                (choice,) = msgspec.json.decode(last.response)["choices"]
                self._set_history(trajectory, [*messages, *_canonicals([choice.get("message")])])
        log.info("detected trajectories taken over", trajectories=len(self._open))

    async def _complete(self, trajectory: Trajectory) -> None:
        try:
            if trajectory.id in self._taken_over and await trajectory.refresh():
                trajectory.used_at = time.monotonic()  # another gateway continues it
                return
            await self._registry.complete(trajectory.id, Completion(outcome=self._outcome), inferred=True)
        except BrokerError as error:
            log.warning("detected trajectory is completed later", trajectory=trajectory.id, error=str(error))
            return
        except ApiError as error:
            log.warning("detected trajectory not completed", trajectory=trajectory.id, error=error.message)
        self._forget_history(trajectory)
        self._taken_over.discard(trajectory.id)
        self._open.pop(trajectory.id, None)


Canonical = tuple[str, str, str]
"""Role, text and tool calls: what clients keep of a message when they send it back. Arguments of tool calls are
compared as JSON, since clients parse them and write them again in their own way."""


def _messages(call: Call) -> list[Canonical]:
    raw = call.fields.get("messages")
    return _canonicals(msgspec.json.decode(raw) if raw is not None else [])


def _canonicals(messages: Any) -> list[Canonical]:
    """The messages without empty ones of the assistant, which some clients leave out of the history they send."""
    found = [_canonical(m) for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return [m for m in found if m != ("assistant", "", "")]


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
    """The arguments of a tool call, parsed if they are JSON. Clients send empty ones as `""` or `{}`."""
    if not isinstance(sent, str):
        return _numbers(sent) or {}
    try:
        return _numbers(msgspec.json.decode(sent)) or {} if sent.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        return sent


def _numbers(value: Any) -> Any:
    """`value` with 1.0 replaced by 1, as JavaScript writes it."""
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _histories(owner: str, model: str, messages: list[Canonical]) -> list[bytes]:
    """A hash of the first message, of the first two, and so on, for one owner and model."""
    digest = hashlib.sha256(f"{owner}\0{model}".encode())
    out = []
    for message in messages:
        digest.update(msgspec.msgpack.encode(message))
        out.append(digest.digest())
    return out
