"""One model call: whose it is, which version answers, what the log gets, what the client sees.

The order that everything else relies on: sampled, recorded and acknowledged, then answered. A client that retries a
call whose answer was recorded but never arrived is given the recorded one, not a second sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from pipeline import crash
from pipeline.config import GatewayConfig
from pipeline.events import ExchangeRecorded
from pipeline.log.broker import BrokerError
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.exchange import Attempt, Caller, Exchange, Status, StreamSink
from rollout_gateway.capture.reach import Reach
from rollout_gateway.capture.runs import Trajectory
from rollout_gateway.capture.trajectories import Registry
from rollout_gateway.dialects import calls as wire
from rollout_gateway.dialects.calls import Answer, Call
from rollout_gateway.dialects.endpoints import Dialect
from rollout_gateway.dialects.streaming import StreamCapture
from rollout_gateway.http.errors import (
    ApiError,
    ClientGoneError,
    error_body,
    stopping,
    timed_out,
    unavailable,
)
from rollout_gateway.http.upstream import UpstreamError, UpstreamTimeoutError
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import Router

log = get_logger("rollout_gateway.capture.chat")

_DONE = b"data: [DONE]\n\n"
_MOST_PENDING = 1_000
"""Records under way at once with `gateway.capture = "async"`; beyond it, a call waits for its own."""


class ChatHandler:
    """Plain and streamed calls of either dialect."""

    def __init__(self, gateway: GatewayConfig, fleet: Fleet, registry: Registry, router: Router) -> None:
        self._gateway, self._registry = gateway, registry
        self._reach = Reach(gateway, fleet, router)
        self.on_answered: list[Callable[[Trajectory, Call, Answer], None]] = []
        self._background: set[asyncio.Task[None]] = set()

    # -- plain ---------------------------------------------------------------------------------------------------

    async def plain(self, dialect: Dialect, call: Call, caller: Caller) -> tuple[int, bytes]:
        """Status and body of the answer. Raises `ApiError`; `ClientGoneError` where the client left before the end."""
        trajectory = self._captured(caller)
        if trajectory is None:
            with caller.calling():
                attempt = await self._reach.answer(dialect, call, caller, None)
            return attempt.status, attempt.body
        trajectory.begin()
        try:
            exchange = Exchange(dialect, call, caller, trajectory)
            before = await self._answered_before(exchange)
            if before is not None:
                return 200, msgspec.json.encode(before)
            attempt = await self._ask_recorded(dialect, call, caller, exchange)
            if attempt.status != 200:
                return attempt.status, attempt.body
            answer = _read_answer(dialect, attempt.body, call)
            await self._record(exchange, answer, "complete")
            self._tell(exchange, answer)
            return 200, answer.client_body()
        finally:
            trajectory.end()

    async def _ask_recorded(
        self, dialect: Dialect, call: Call, caller: Caller, exchange: Exchange
    ) -> Attempt:
        """`Reach.answer`; a call that was sampled for and got no answer is on the log as what it was."""
        try:
            return await self._reach.answer(dialect, call, caller, exchange)
        except (ClientGoneError, ApiError) as error:
            if exchange.version:
                gone = isinstance(error, ClientGoneError)
                await self._record(exchange, Answer({}, b"", []), "cancelled" if gone else "failed")
            raise

    # -- streamed ------------------------------------------------------------------------------------------------

    async def stream(
        self, dialect: Dialect, call: Call, caller: Caller, sink: StreamSink
    ) -> tuple[int, bytes]:
        """Status, and the body where it is an error; otherwise `sink` has had the whole stream.

        Raises as `plain` does, before the sink was started."""
        trajectory = self._captured(caller)
        if trajectory is None:
            with caller.calling():
                attempt = await self._reach.answer(dialect, call, caller, None)
                if attempt.status != 200:
                    return attempt.status, attempt.body
                await self._pass_through(attempt, caller, sink)
            return 200, b""
        trajectory.begin()
        streaming = False
        try:
            exchange = Exchange(dialect, call, caller, trajectory)
            before = await self._answered_before(exchange)
            if before is not None:
                sink.start(_unhurried)
                sink.write(b"".join(b"data: %b\n\n" % event for event in dialect.as_stream(before)))
                sink.write(_DONE)
                sink.end()
                return 200, b""
            attempt = await self._ask_recorded(dialect, call, caller, exchange)
            if attempt.status != 200:
                return attempt.status, attempt.body
            streaming = True
            await self._capture_stream(exchange, attempt, sink)
            return 200, b""
        finally:
            if not streaming:
                trajectory.end()

    async def _pass_through(self, attempt: Attempt, caller: Caller, sink: StreamSink) -> None:
        sink.start(attempt.reply.flow)
        try:
            await attempt.reply.pipe(sink.write)
        except UpstreamError as error:
            if not caller.gone:
                sink.write(self._broken(attempt, caller, error))
        finally:
            caller.when_gone(None)
            attempt.lease.release()
        sink.end()

    async def _capture_stream(self, exchange: Exchange, attempt: Attempt, sink: StreamSink) -> None:
        capture = StreamCapture(exchange.dialect, exchange.call)
        status: Status = "failed"
        broken = b""
        sink.start(attempt.reply.flow)

        def take(data: bytes) -> None:
            if seen := capture.take(data):
                sink.write(seen)

        write_chunks = sink.write_chunks

        def cut(data: bytes) -> int:
            taken, seen = capture.cut(data)
            if taken:
                write_chunks(seen)  # type: ignore[misc]  # asked for below
            return taken

        try:
            await attempt.reply.pipe(take, cut if write_chunks is not None else None)
            if not capture.ended:
                raise UpstreamError("the stream ended without its end", answered=True)
        except (UpstreamError, msgspec.DecodeError) as error:
            if not capture.ended:
                if exchange.caller.gone:
                    status = "cancelled"
                else:
                    broken = self._broken(attempt, exchange.caller, error)
        finally:
            if capture.ended and not capture.error:
                status = "complete"
            exchange.caller.when_gone(None)
            attempt.lease.release()
            exchange.first_token_at = capture.first_token_at
            self._tried(exchange, attempt, status, died=bool(broken) or capture.server_failed)
            # As a task of its own: the record is made even where this one is cancelled.
            recording = asyncio.ensure_future(self._record_stream(exchange, capture, status))
            self._background.add(recording)
            recording.add_done_callback(self._background.discard)
        try:
            await asyncio.shield(recording)
        except ApiError as error:
            broken = b"data: %b\n\n" % error.body()
        sink.write(broken or capture.held + _DONE)
        sink.end()

    async def _record_stream(self, exchange: Exchange, capture: StreamCapture, status: Status) -> None:
        try:
            answer = capture.answer()
            await self._record(exchange, answer, status)
            if status == "complete":
                self._tell(exchange, answer)
        finally:
            exchange.trajectory.end()

    def _tried(self, exchange: Exchange, attempt: Attempt, status: Status, *, died: bool) -> None:
        """A stream has ended: say so to whoever looks for requests that kill their server."""
        if died and not exchange.caller.cut:
            self._in_background(self._reach.broke_off(exchange.call, exchange, attempt))
        elif attempt.trial is not None:
            attempt.trial.answered() if status == "complete" else attempt.trial.left()

    def _broken(self, attempt: Attempt, caller: Caller, error: Exception) -> bytes:
        """The server broke off in mid-stream: suspect it, and give the event that says so. A slow one is not suspected, and
        neither is one whose stream was cut off here."""
        if isinstance(error, UpstreamTimeoutError):
            return b"data: %b\n\n" % timed_out().body()
        if caller.cut:
            return b"data: %b\n\n" % stopping().body()
        log.warning("stream broke off", replica=attempt.lease.replica.name, error=str(error))
        attempt.lease.replica.suspect()
        message = f"The inference server broke off: {error}"
        return b"data: %b\n\n" % error_body(message, "api_error", "upstream_broke_off")

    async def settle(self) -> None:
        """Until everything that began to be recorded is on the log."""
        while self._background:
            await asyncio.wait(self._background)

    # -- the log -------------------------------------------------------------------------------------------------

    def _captured(self, caller: Caller) -> Trajectory | None:
        return None if self._gateway.capture == "off" else caller.trajectory

    def keeps(self, caller: Caller) -> bool:
        """Whether the log gets this caller's calls."""
        return self._captured(caller) is not None

    async def _answered_before(self, exchange: Exchange) -> wire.Fields | None:
        """The recorded reply to the same request, where the client says that it asks again."""
        if not exchange.caller.retry:
            return None
        if self._gateway.capture == "async":
            async with exchange.trajectory.lock:
                pass  # what was answered before is on the log now
        events = await self._registry.recorded_call(exchange.trajectory, exchange.hash())
        if not events:
            return None
        log.info("answered from the log", trajectory=exchange.trajectory.id, seq=events[0].seq)
        return exchange.dialect.merged([e.response for e in events])

    def _tell(self, exchange: Exchange, answer: Answer) -> None:
        for callback in self.on_answered:
            callback(exchange.trajectory, exchange.call, answer)

    async def _record(self, exchange: Exchange, answer: Answer, status: Status) -> None:
        """Put the call on the log; raises a 503 `ApiError` where the log does not take it."""
        if self._gateway.capture == "async" and len(self._background) < _MOST_PENDING:
            # Held, so that a completion waits for it and counts it.
            exchange.trajectory.hold()
            self._in_background(self._publish_later(exchange, answer, status))
        else:
            await self._publish(exchange, answer, status)
        crash.point("gateway.before_answer")

    async def _publish(self, exchange: Exchange, answer: Answer, status: Status) -> None:
        try:
            await self._registry.record(
                exchange.trajectory,
                lambda seq: exchange.events(answer, seq, status),
                exchange.caller.traceparent,
            )
        except BrokerError as error:
            log.error("not recorded", trajectory=exchange.trajectory.id, error=str(error))
            raise unavailable(f"The answer could not be recorded: {error}", "not_recorded") from error

    async def _publish_later(self, exchange: Exchange, answer: Answer, status: Status) -> None:
        """For `capture = "async"`: no one waits for it, so a failure is kept with the run, whose completion tells of it."""
        try:
            await self._publish(exchange, answer, status)
        except ApiError:  # logged where it was raised
            exchange.trajectory.not_recorded += 1
            self._registry.not_recorded += 1
        finally:
            exchange.trajectory.end()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def answered(self, trajectory: Trajectory, reply: str) -> ExchangeRecorded | None:
        """The complete exchange of an open trajectory whose reply has the id `reply`."""
        return await self._registry.exchange_of(trajectory, reply)


def _read_answer(dialect: Dialect, body: bytes, call: Call) -> Answer:
    try:
        return dialect.read_answer(body, call)
    except (msgspec.DecodeError, KeyError) as error:
        raise ApiError(
            502,
            f"The inference server's answer can't be read: {error}",
            kind="api_error",
            code="bad_upstream",
        ) from error


def _unhurried(_: bool) -> None:
    """Flow control of a stream that is there as a whole."""
