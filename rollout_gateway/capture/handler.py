"""Answers one model call: has it sampled (`dispatch`), recorded (`Trajectory.record`) and only then delivered.

The record is acknowledged by the log before the client gets the answer, or the end of a stream; if the log does not
take it, the client gets an error. Other code relies on this order. `app` calls `CallHandler.answer` for calls of
policies; `outside.relay` uses the parts that record. A "captured" call is one that belongs to a run, and so is
recorded.

A client that repeats a call whose answer was recorded and never arrived gets the recorded answer, not a second sample.
"""

from __future__ import annotations

import asyncio

import msgspec

from pipeline import crash
from pipeline.config import GatewayConfig
from pipeline.log.broker import BrokerError
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.answer_ids import new_answer_id
from rollout_gateway.capture.detection import TrajectoryDetector
from rollout_gateway.capture.dispatch import Attempt, Dispatcher
from rollout_gateway.capture.exchange import Caller, Exchange, Status
from rollout_gateway.capture.masking import in_thread_if_large
from rollout_gateway.dialects.calls import Answer, Call, Fields
from rollout_gateway.dialects.endpoints import MALFORMED, merge_responses, read_answer
from rollout_gateway.dialects.streaming import DONE, StreamCapture, replay
from rollout_gateway.dialects.translate import TranslatedSink
from rollout_gateway.http.errors import ApiError, ClientGoneError, answer_too_long, bad_answer, timed_out
from rollout_gateway.http.request import Request
from rollout_gateway.http.upstream import UpstreamError, UpstreamInvalidError, UpstreamTimeoutError
from rollout_gateway.serving.replicas import Fleet
from rollout_gateway.serving.routing import VersionRouter

logger = get_logger("rollout_gateway.capture.handler")

Sink = Request | TranslatedSink
"""Where a streamed answer is written: to its request as it is, or translated."""


class UnsureError(Exception):
    """An answer was recorded and is not shown, as its mean logprob is below `Caller.min_logprob`."""


class CallHandler:
    """Answers plain and streamed calls."""

    def __init__(
        self, gateway: GatewayConfig, fleet: Fleet, router: VersionRouter, detector: TrajectoryDetector | None = None
    ) -> None:
        """`detector` is told of every captured call that was answered, before the client gets the answer; `None` if
        runs are not detected."""
        self._detector = detector
        self._dispatcher = Dispatcher(gateway, fleet, router)
        self._recording: set[asyncio.Task[None]] = set()
        """Records of streams and of providers' answers that are being made, even if their calls are cancelled."""

    async def answer(self, call: Call, caller: Caller, sink: Sink | None = None) -> tuple[int, bytes]:
        """Answer a call. Returns status and body; a streamed answer with status 200 is written to `sink`, and the body
        is empty.

        Raises `ApiError`, and `ClientGoneError` if the client left before the end, unless `sink` was started.
        `UnsureError`: the answer is not shown."""
        if caller.trajectory is not None:
            caller.trajectory.begin()
        try:
            exchange = await self._new_exchange(call, caller)
            if caller.is_retry and (reply := await self.recorded_reply(exchange)) is not None:
                return await _deliver(msgspec.json.encode(reply), sink)
            attempt = await self._answer_or_record_failure(exchange)
            if attempt.reply.status != 200:
                return attempt.reply.status, attempt.body
            if sink is not None and not call.asks_whole:
                await sink.start()
                await self._stream(exchange, attempt, sink)
                await sink.end()
                return 200, b""
            try:
                exchange.answer = await in_thread_if_large(len(attempt.body), read_answer, attempt.body, call)
            except MALFORMED as error:
                if exchange.captured:
                    await self._record(exchange, "failed")
                raise bad_answer(call.served_by, error) from error
            if exchange.captured:
                await self._hold_back_unsure(exchange)
                await self._record(exchange, "complete")
                await self._report_answer(exchange)
            return await _deliver(exchange.answer.client_body(), sink)
        finally:
            if caller.trajectory is not None:
                caller.trajectory.end()

    async def _new_exchange(self, call: Call, caller: Caller) -> Exchange:
        """Return the exchange of a call that begins; for a captured one with the id that the answer will have. Raises a
        400 `ApiError` for a call that could not be recorded masked."""
        exchange = Exchange(call, caller)
        if exchange.captured:
            await exchange.recorded_in.log.masks.check_call(call.body)
            exchange.answer_id = new_answer_id(exchange.recorded_in.id)
            if exchange.recorded_in.opened.references:
                call.referenced_in = exchange.recorded_in.id
        return exchange

    async def _answer_or_record_failure(self, exchange: Exchange) -> Attempt:
        """Send the call to an inference server. A call that was sent to a server but not answered is recorded as
        cancelled or failed.

        Raises `ClientGoneError` if the client left, and `ApiError` if no server answered."""
        try:
            try:
                async with asyncio.timeout(exchange.caller.wait_s or None) as limit:
                    with exchange.caller.cancellation:
                        return await self._dispatcher.answer(exchange)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise timed_out(exchange.caller.wait_s) from error
        except (ClientGoneError, ApiError) as error:
            if exchange.captured and exchange.version:  # the version is set once the call is sent
                await self._record(exchange, "cancelled" if isinstance(error, ClientGoneError) else "failed")
            raise

    async def _hold_back_unsure(self, exchange: Exchange) -> None:
        """If a choice of the answer has a mean logprob below `Caller.min_logprob`, record the answer as unsure and
        raise `UnsureError`."""
        least = exchange.caller.min_logprob
        if least is None:
            return
        logprob = min(choice.mean_logprob() for choice in exchange.answer.choices)
        if logprob < least:
            await self._record(exchange, "unsure")
            raise UnsureError(f"it was unsure: its mean logprob {logprob:.4g} is below {least:.4g}")

    # -- streams -------------------------------------------------------------------------------------------------

    async def _stream(self, exchange: Exchange, attempt: Attempt, sink: Sink) -> None:
        """Pass the server's stream on to the client, record it, and then write its last events: a client that has got
        the end finds the call on the log. However the stream ends, what was sampled is recorded."""
        capture = StreamCapture(exchange.call)
        status: Status = "failed"
        failure: ApiError | None = None
        """What the client is told in place of the stream's end."""
        size = 0
        try:
            with exchange.caller.cancellation:
                while data := await attempt.reply.read_some():
                    attempt.reply.check_size(size := size + len(data))
                    if for_client := capture.feed(data):
                        await sink.write(for_client)
            if not capture.ended:
                raise UpstreamError("the stream ended without its last event")
        except ClientGoneError:
            status = "cancelled"
        except (ApiError, UpstreamError, *MALFORMED) as error:
            if not capture.ended:
                failure = _stream_error(attempt, error)
        finally:
            if capture.ended:
                status = "failed" if capture.error_code else "complete"
            exchange.first_token_at = capture.first_token_at
            attempt.close()
            if capture.error_code >= 500 or (failure is not None and failure.code == "upstream_broke_off"):
                attempt.lease.replica.suspect()
            if exchange.captured:
                recording = self.begin_record(exchange, capture.answer(), status)
        if exchange.captured:
            try:
                await asyncio.shield(recording)  # the record is made even if this task is cancelled
            except ApiError as error:
                failure = error
        await sink.write(b"data: %b\n\n" % failure.body() if failure is not None else capture.last_events + DONE)

    # -- records -------------------------------------------------------------------------------------------------

    def begin_record(self, exchange: Exchange, answer: Answer, status: Status) -> asyncio.Task[None]:
        """Begin to record a captured call with its answer, in a task that goes on if the caller is cancelled. Returns
        the task, which raises as `_record_and_report`. `settle` waits for it."""
        exchange.answer = answer
        exchange.recorded_in.begin_work()
        recording = asyncio.ensure_future(self._record_and_report(exchange, status))
        self._recording.add(recording)
        recording.add_done_callback(self._recording.discard)
        return recording

    async def _record_and_report(self, exchange: Exchange, status: Status) -> None:
        """Record a call, report a complete one to the detector, and end the work that `begin_record` began. Raises a
        503 `ApiError` if the log does not take the call."""
        try:
            await self._record(exchange, status)
            if status == "complete":
                await self._report_answer(exchange)
        finally:
            exchange.recorded_in.end()

    async def recorded_reply(self, exchange: Exchange) -> Fields | None:
        """Return the recorded reply to an equal request of the same run, for a client that repeats it; `None` if there
        is none."""
        if not exchange.captured:
            return None
        trajectory = exchange.recorded_in
        events = await trajectory.recorded_call(exchange.request_hash)
        if not events:
            return None
        logger.info("answered from the log", trajectory=trajectory.id, seq=events[0].seq)
        return merge_responses([e.response for e in events])

    async def _report_answer(self, exchange: Exchange) -> None:
        """Tell the detector of a recorded answer, by which it finds the run's next call."""
        if self._detector is not None:
            await self._detector.note_answer(exchange.recorded_in, exchange.call, exchange.answer)

    async def _record(self, exchange: Exchange, status: Status) -> None:
        """Put the call on the log. Raises a 503 `ApiError` if the log does not take it."""
        exchange.status = status
        try:
            exchange.seq = await exchange.recorded_in.record(exchange.events(), exchange.caller.traceparent)
        except BrokerError as error:
            logger.error("call not recorded", trajectory=exchange.recorded_in.id, error=str(error))
            raise ApiError(503, "not_recorded", f"The answer could not be recorded: {error}") from error
        crash.point("gateway.before_answer")

    async def settle(self) -> None:
        """Wait until every record that was begun has ended, before the gateway stops."""
        while self._recording:
            await asyncio.wait(self._recording)


async def _deliver(body: bytes, sink: Sink | None) -> tuple[int, bytes]:
    """Return status and body of a whole chat completion, or write it to `sink` as a stream."""
    if sink is None:
        return 200, body
    await sink.start()
    await sink.write(replay(msgspec.json.decode(body, type=Fields)))
    await sink.end()
    return 200, b""


def _stream_error(attempt: Attempt, error: Exception) -> ApiError:
    """Return the error that a client gets in place of a stream's end. Only one with the code `upstream_broke_off` is
    the inference server's failure, and logged."""
    match error:
        case ApiError():
            return error
        case UpstreamTimeoutError():
            return timed_out()
        case UpstreamInvalidError():
            return answer_too_long(error)
    logger.warning("stream broke off", replica=attempt.lease.replica.name, error=str(error))
    return ApiError(502, "upstream_broke_off", f"The inference server ended the stream early: {error}")
