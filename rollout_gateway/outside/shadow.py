"""Shadow calls: an apprentice is asked what an outside model was asked, and its answer is put on the log.

An apprentice is the policy that learns to replace an outside model; the judge compares its answers with that model's
(`judge.comparing`), which shows when it is good enough. `rollout_gateway.outside.relay` offers each recorded call.
Nobody waits for a shadow call. It begins when the agent has its answer, at an inference server that answers no agent's
call, and is broken off when one comes; then it waits for its next turn. Its answer is an event of its own
(`rollout.shadow`): no exchange, so it is part of no run, no group and no training row."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import anyio
import msgspec

from pipeline.config import Config, OutsideConfig
from pipeline.events import ShadowAnswered, now_us
from pipeline.log.broker import BrokerError
from pipeline.names import new_id, parse_version, split_point
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.exchange import Exchange
from rollout_gateway.capture.trajectory import Trajectory
from rollout_gateway.dialects.calls import Answer, Call
from rollout_gateway.dialects.endpoints import MALFORMED, read_answer, read_chat, upstream_body
from rollout_gateway.dialects.permitted import SENT, Permitted
from rollout_gateway.http.errors import ApiError
from rollout_gateway.http.upstream import UpstreamError
from rollout_gateway.outside.answers import UNREADABLE
from rollout_gateway.serving.replicas import Fleet, Lease
from rollout_gateway.serving.routing import VersionRouter

logger = get_logger("rollout_gateway.outside.shadow")

_MAX_WAITING, _MAX_WAITING_BYTES = 256, 64 << 20
"""Shadow calls that wait, and bytes of their requests and of the outside model's answers, at most."""
_MAX_WAIT_S = 600.0
"""How long a shadow call may wait: what is recorded of a run is not to come long after it."""
_FIELDS_OF_FORM = frozenset(("n", "stream", "stream_options", "logprobs", "top_logprobs"))
"""Fields by which the agent asks for another form of answer: a shadow call has one choice, and is no stream."""


@dataclass(eq=False, slots=True)
class _Shadow:
    """A shadow call that waits or is under way."""

    run: Trajectory
    seq: int
    outside_answer: Any
    """What the outside model answered, as `comparable_answer` returns it."""
    table: OutsideConfig
    call: Call
    size: int
    offered_at: float
    """By `time.monotonic`."""


class Shadows:
    """The shadow calls of a gateway process. `run` makes them."""

    def __init__(self, config: Config, fleet: Fleet, router: VersionRouter, permitted: Permitted) -> None:
        self._tables = {t.name: t for t in config.outside if t.shadow_percent > 0}
        self._timeout_s, self._permitted = config.gateway.replicas.timeout_s, permitted
        self._fleet, self._router = fleet, router
        self._waiting: dict[str, deque[_Shadow]] = {name: deque() for name in self._tables}
        """By outside model."""
        self._under_way: Counter[str] = Counter()
        """Number of shadow calls under way, by outside model."""
        self.counts: Counter[str] = Counter()
        """Shadow calls by how they ended: `answered`, `failed`, or `dropped` for want of a free server."""

    def offer(self, exchange: Exchange) -> None:
        """Have the apprentice asked about this recorded and complete call of an outside model, if the call is in the
        share `outside.shadow_percent`, which is drawn by its run and number."""
        table = self._tables.get(exchange.call.params.model)
        if table is None or split_point(f"{exchange.recorded_in.id}/{exchange.seq}") >= table.shadow_percent:
            return
        size = len(exchange.call.body) + sum(
            len(bytes(c.fields.get("message", b""))) for c in exchange.answer.choices[:1]
        )
        waiting = self._waiting[table.name]
        waiting_bytes = sum(shadow.size for shadows in self._waiting.values() for shadow in shadows)
        if len(waiting) >= _MAX_WAITING or waiting_bytes + size > _MAX_WAITING_BYTES:
            self.counts["dropped"] += 1
            return
        run, seq = exchange.recorded_in, exchange.seq
        try:
            call = apprentice_call(exchange.call, table.apprentice, self._permitted)
            shadow = _Shadow(run, seq, comparable_answer(exchange.answer), table, call, size, time.monotonic())
        except UNREADABLE as error:
            self._count_failure(run, seq, error)
            return
        waiting.append(shadow)
        self._fleet.idle.set()

    async def run(self) -> None:
        """Make the calls that are offered. Returns at once if there is no model to shadow, else never."""
        async with anyio.create_task_group() as tasks:
            while self._tables:
                await self._fleet.idle.wait()
                self._fleet.idle.clear()
                for name in self._tables:
                    while (turn := self._next_turn(name)) is not None:
                        tasks.start_soon(self._ask, *turn)

    def _next_turn(self, name: str) -> tuple[_Shadow, Lease, anyio.CancelScope] | None:
        """Return the next shadow call of an outside model that can begin now, with the lease of its server and the
        scope by which a call of an agent at that server breaks it off; `None` if none can. Calls that have waited too
        long are dropped."""
        table, waiting = self._tables[name], self._waiting[name]
        while waiting and time.monotonic() - waiting[0].offered_at > _MAX_WAIT_S:
            waiting.popleft()
            self.counts["dropped"] += 1
        if not waiting or self._under_way[name] >= table.shadow_calls:
            return None
        lease = self._fleet.acquire_idle(self._router.newest_loaded(table.apprentice))
        if lease is None:
            return None
        shadow, scope = waiting.popleft(), anyio.CancelScope()
        self._under_way[name] += 1
        lease.replica.shadows.add(scope)
        return shadow, lease, scope

    async def _ask(self, shadow: _Shadow, lease: Lease, scope: anyio.CancelScope) -> None:
        """Make one shadow call and record its answer. If it is broken off, it waits again, as the first in its
        queue."""
        answer, same, started_at = None, False, now_us()
        try:
            with scope:
                answer = await self._answer(shadow.call, lease)
                same = comparable_answer(answer) == shadow.outside_answer
        except (UpstreamError, *MALFORMED) as error:
            self._count_failure(shadow.run, shadow.seq, error)
            return
        finally:
            lease.replica.shadows.discard(scope)
            self._under_way[shadow.table.name] -= 1
            lease.release()
            self._fleet.idle.set()  # the next one may begin, even if another goes on at this server
        if answer is not None:
            await self._record(shadow, lease, answer, same, started_at)
        else:
            self._waiting[shadow.table.name].appendleft(shadow)

    async def _answer(self, call: Call, lease: Lease) -> Answer:
        """Return the apprentice's answer. Raises `UpstreamError`, and one of `MALFORMED`."""
        body = upstream_body(call, lease.version, answer_id=new_id("shadow"))
        reply = await lease.replica.upstream.request("POST", call.served_by, body, timeout_s=self._timeout_s)
        data = await reply.read()
        if reply.status != 200:
            raise UpstreamError(f"it answered {reply.status}: {data[:300].decode(errors='replace')}")
        return read_answer(data, call)

    async def _record(self, shadow: _Shadow, lease: Lease, answer: Answer, same: bool, started_at: int) -> None:
        """Put the answer on the log. `same`: whether it says what the outside model said; then the judge compares
        nothing."""
        run, (choice,) = shadow.run, answer.choices
        event = ShadowAnswered(
            project=run.opened.project,
            trajectory=run.id,
            call=shadow.seq,
            model=shadow.table.apprentice,
            policy_version=lease.version,
            step=parse_version(lease.version)[1],
            outside=shadow.table.name,
            response=answer.client_body(choice),
            prompt_tokens=len(answer.prompt_ids) // 4,
            sampled_ids=choice.ids,
            logprobs=choice.logprobs,
            finish_reason=choice.finish_reason,
            same=same,
            replica=lease.replica.name,
            started_at=started_at,
        )
        try:
            await run.log.publish(await run.log.masks.apply(event), {"traceparent": run.traceparent})
        except (ApiError, BrokerError) as error:
            self._count_failure(run, shadow.seq, error)
        else:
            self.counts["answered"] += 1

    def _count_failure(self, run: Trajectory, seq: int, error: Exception) -> None:
        """Count and log a shadow call that has no answer on the log."""
        self.counts["failed"] += 1
        logger.warning("shadow call failed", trajectory=run.id, call=seq, error=str(error)[:500])


def apprentice_call(call: Call, apprentice: str, permitted: Permitted) -> Call:
    """Return a call of an outside model as a call of the policy model `apprentice`: not streamed, with one choice, and
    without fields that no inference server here takes. Raises a 400 `ApiError` if the apprentice can't be asked it."""
    fields = {name: raw for name, raw in call.fields.items() if name in SENT - _FIELDS_OF_FORM}
    shadow_call = read_chat(msgspec.json.encode({**fields, "model": apprentice}))
    permitted.check(shadow_call.fields)
    return shadow_call


def comparable_answer(answer: Answer) -> Any:
    """Return the text and the tool calls of an answer's first choice, in a form that is equal for two answers that
    differ in white space or the order of JSON's fields only. Raises one of `UNREADABLE`: a provider may have said
    anything."""
    fields = answer.choices[0].fields if answer.choices else {}
    message = msgspec.json.decode(fields.get("message", b"{}"))
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    calls = [(function.get("name"), _comparable(function.get("arguments"))) for function in functions]
    return _comparable(message.get("content") or ""), calls


def _comparable(text: Any) -> Any:
    """Return the value of a text that is JSON, and another text without the white space around it, so that texts are
    equal which differ in white space only."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, TypeError):
        return text.strip() if isinstance(text, str) else text
