"""Detects the trajectories of agents that name none, by the messages of their calls (opt-in:
`gateway.detection.enabled`).

A call whose messages begin with everything that a run had said and been answered so far belongs to that run. Any other
call begins a run, in the group of its first user message. A run without a call for `gateway.detection.idle_s` is
completed. Two runs that have said exactly the same can't be told apart; which of them a call continues is then
arbitrary, and harmless, since both are equal up to there.

Any gateway process may get the next call of a run, also at the same time as others: a run that waits for its next call
is a message on the log (`waiting_runs`), and only the process that takes it away has the run. Any process completes
runs that waited too long. A gateway that starts has those runs wait again that no process seems to have: theirs was
killed in the middle of a call.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
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
from rollout_gateway.capture.waiting_runs import WaitingRun, WaitingRuns, no_history
from rollout_gateway.dialects.calls import Answer, Call
from rollout_gateway.http.errors import ApiError

log = get_logger("rollout_gateway.capture.detection")

_CHECK_S = 1.0
_LEFT_S = 2.0
"""How long a run may have no call in flight in the process that took it. After that its call has failed."""
_PREFIX = "i"
"""Ids of detected trajectories begin with it."""


class TrajectoryDetector:
    """Finds detected trajectories, and completes them."""

    def __init__(self, project: str, registry: Registry, config: GatewayConfig) -> None:
        self._project, self._registry = project, registry
        self._waiting = WaitingRuns(registry.log.broker, project)
        self._idle_s, self._outcome = config.detection.idle_s, config.detection.outcome
        # Another gateway may have a call of a restored run in flight; it is recorded only when it ends.
        self._restored_idle_s = config.detection.idle_s + config.replicas.timeout_s
        self._taken: dict[str, tuple[Trajectory, str]] = {}
        """By id, the runs whose next call this process serves, and their histories before the call."""
        self._to_put: list[WaitingRun] = []
        """Runs whose message could not be published again because the log did not answer."""
        self._ready = asyncio.Event()
        self._began = 0.0
        """Unix time at which this process began to serve calls. The idle time of a run counts from then at the
        earliest, because agents could not call before."""

    async def find(self, call: Call, model: str, owner: str = "") -> Trajectory:
        """The run that this call continues, or a new one. A run continues only with calls of the key that began it,
        `owner`. Raises `BrokerError`."""
        await self._ready.wait()
        messages = _messages(call)
        for history in _possible_histories(owner, model, messages):
            while (waiting := await self._waiting.take(history)) is not None:
                run = await self._resume(waiting)
                if run is not None:
                    run.used_at = time.monotonic()
                    self._taken[run.id] = run, history
                    return run
        first = next((m for m in messages if m[0] == "user"), messages[0] if messages else ("", "", ""))
        group = hashlib.sha256(msgspec.msgpack.encode((owner, model, first))).hexdigest()[:20]
        event = TrajectoryOpened(
            project=self._project,
            trajectory=new_dated_id(_PREFIX),
            model=model,
            group=f"i-{group}",
            metadata=b'{"inferred":true}',
            owner=owner,
        )
        trajectory = await self._registry.open(event, "")
        self._taken[trajectory.id] = trajectory, no_history(trajectory.id)
        return trajectory

    async def _resume(self, waiting: WaitingRun) -> Trajectory | None:
        """Return the run that was taken; `None` if it was completed or continued with another call since it began to
        wait."""
        try:
            run = await self._registry.find(waiting.run)
            if waiting.restored or run.recorded.next_seq != waiting.calls:
                await run.refresh()
        except ApiError as error:
            log.info("detected trajectory can't be continued", trajectory=waiting.run, reason=error.code)
            return None
        except BrokerError:
            self._to_put.append(waiting)
            raise
        return run if run.recorded.next_seq <= waiting.calls else None

    async def answered(self, trajectory: Trajectory, call: Call, answer: Answer) -> None:
        """Have a detected run wait for its next call, which begins with this answer."""
        if trajectory.id not in self._taken or not answer.choices:
            return
        del self._taken[trajectory.id]
        said = msgspec.json.decode(answer.choices[0].fields.get("message", msgspec.Raw(b"{}")))
        history = _history(trajectory.opened, [*_messages(call), *_canonicals([said])])
        await self._put(WaitingRun(trajectory.id, history, trajectory.recorded.next_seq))

    async def _put(self, waiting: WaitingRun) -> None:
        try:
            await self._waiting.put(waiting)
        except BrokerError as error:
            log.warning("detected trajectory waits for the log", trajectory=waiting.run, error=str(error))
            self._to_put.append(waiting)

    # -- completing ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Restore runs that nobody has, then complete those that fall silent. Never returns."""
        await self._restore()
        self._began = time.time()
        self._ready.set()
        while True:
            # Not all gateways at the same moment: they would try to complete the same runs.
            await asyncio.sleep(min(_CHECK_S, self._idle_s / 2) * random.uniform(0.5, 1.0))
            to_put, self._to_put = self._to_put, []
            for waiting in (*to_put, *self._left()):
                await self._put(waiting)
            try:
                await self._complete_idle()
            except BrokerError as error:
                log.warning("detected trajectories are completed later", error=str(error))

    def _left(self) -> list[WaitingRun]:
        """Return the runs whose call ended without an answer. They wait for a call again."""
        before = time.monotonic() - _LEFT_S
        left = [(t, history) for t, history in self._taken.values() if not t.in_flight and t.used_at < before]
        for trajectory, _ in left:
            del self._taken[trajectory.id]
        return [WaitingRun(t.id, history, t.recorded.next_seq) for t, history in left]

    async def _restore(self) -> None:
        """Have the unfinished runs wait that do not."""
        while True:
            try:
                waiting = await self._waiting.names()
                unfinished = await self._registry.log.unfinished(f"{_PREFIX}-")
                break
            except BrokerError as error:
                log.warning("detected trajectories wait for the log", error=str(error))
                await asyncio.sleep(_CHECK_S)
        restored = 0
        for name in unfinished:
            if name in waiting:
                continue
            try:
                trajectory = await self._registry.find(name)
                if not msgspec.json.decode(bytes(trajectory.opened.metadata)).get("inferred"):
                    continue
                last = await trajectory.last_answer()
            except (ApiError, BrokerError, InvalidNameError) as error:
                log.warning("detected trajectory not restored", trajectory=name, error=str(error))
                continue
            history = no_history(name)
            if last is not None:
                messages = _canonicals(msgspec.json.decode(last.request).get("messages"))
                (choice,) = msgspec.json.decode(last.response)["choices"]
                history = _history(trajectory.opened, [*messages, *_canonicals([choice.get("message")])])
            await self._put(WaitingRun(name, history, trajectory.recorded.next_seq, restored=True))
            restored += 1
        log.info("detected trajectories", waiting=len(waiting), restored=restored)

    async def _complete_idle(self) -> None:
        """Complete the runs of the project that have waited for too long, whichever process had them last."""
        after = 0
        while (waiting := await self._waiting.next(after)) is not None:
            waited_s = time.time() - max(waiting.since, self._began)
            if waited_s < self._idle_s:
                return  # so have all that come after it
            after = waiting.seq
            if waiting.restored and waited_s < self._restored_idle_s:
                continue
            if await self._waiting.claim(waiting):
                await self._complete(waiting)

    async def _complete(self, waiting: WaitingRun) -> None:
        try:
            if await self._resume(waiting) is not None:
                completion = Completion(outcome=self._outcome)
                await self._registry.complete(waiting.run, completion, inferred=True)
        except BrokerError as error:
            log.warning("detected trajectory is completed later", trajectory=waiting.run, error=str(error))
            if waiting not in self._to_put:
                self._to_put.append(waiting)
        except ApiError as error:
            log.warning("detected trajectory not completed", trajectory=waiting.run, error=error.message)


Canonical = tuple[str, str, str]
"""Role, text and tool calls: what clients keep of a message when they send it back. Arguments of tool calls are
compared as JSON, since clients parse them and write them again in their own way."""


def _messages(call: Call) -> list[Canonical]:
    raw = call.fields.get("messages")
    return _canonicals(msgspec.json.decode(raw) if raw is not None else [])


def _canonicals(messages: Any) -> list[Canonical]:
    """The messages without empty ones of the assistant, which some clients leave out of the history they send."""
    said = [_canonical(m) for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    return [m for m in said if m != ("assistant", "", "")]


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


def _history(opened: TrajectoryOpened, messages: list[Canonical]) -> str:
    """A hash of all messages of a run."""
    return _histories(opened.owner, opened.model, messages)[-1]


def _histories(owner: str, model: str, messages: list[Canonical]) -> list[str]:
    """A hash of the first message, of the first two, and so on, for one owner and model."""
    digest = hashlib.sha256(f"{owner}\0{model}".encode())
    out = []
    for message in messages:
        digest.update(msgspec.msgpack.encode(message))
        out.append(digest.hexdigest()[:32])
    return out


def _possible_histories(owner: str, model: str, messages: list[Canonical]) -> list[str]:
    """Histories that a call with these messages may continue, the longest first: they end with an answer. An empty
    answer is left out of a history, so all but the last message are one, too."""
    histories = _histories(owner, model, messages[:-1])
    return [
        history
        for index, history in reversed(list(enumerate(histories)))
        if messages[index][0] == "assistant" or index == len(histories) - 1
    ]
