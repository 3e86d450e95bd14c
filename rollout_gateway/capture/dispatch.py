"""Sends a call to an inference server: waits for a free replica, and retries if the server fails."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

import msgspec

from pipeline.config import GatewayConfig
from pipeline.events import now_us
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.exchange import Exchange
from rollout_gateway.dialects.calls import Echo
from rollout_gateway.http.errors import bad_answer, timed_out
from rollout_gateway.http.upstream import UpstreamError, UpstreamReply, UpstreamTimeoutError
from rollout_gateway.serving.deadly_requests import DeadlyRequests, Trial
from rollout_gateway.serving.replicas import Fleet, Lease, Replica, least_loaded, replica_of
from rollout_gateway.serving.routing import VersionRouter

log = get_logger("rollout_gateway.capture.dispatch")


class _Detokenized(msgspec.Struct):
    prompt: str


_detokenized_decoder = msgspec.json.Decoder(_Detokenized)


@dataclass(eq=False, slots=True)
class Attempt:
    """A call that was sent to an inference server, and its response."""

    lease: Lease
    reply: UpstreamReply
    incarnation: str
    """Identifies the server process that the call was sent to."""
    body: bytes = b""
    """The whole response; empty if it is streamed."""
    trial: Trial | None = None
    """Set if the same request was in flight when a server died earlier."""

    @property
    def status(self) -> int:
        return self.reply.status

    def close(self) -> None:
        """End a streamed response, whether or not it was read to its end, and release the lease."""
        self.reply.close()
        self.lease.release()


class Dispatcher:
    """Sends calls to the replicas of `fleet`."""

    def __init__(self, gateway: GatewayConfig, fleet: Fleet, router: VersionRouter) -> None:
        self._gateway, self._fleet, self._router = gateway, fleet, router
        self.deadly = DeadlyRequests(gateway.replicas.deadly_request_s)

    async def answer(self, exchange: Exchange) -> Attempt:
        """Wait for a replica that serves the version of the call, send the call to it, and return the response.

        Retries if the server fails before the answer is complete; this is safe because nothing has been sent to the
        client or recorded. A streamed response is returned unread, and the caller must close it; any other response is
        returned read. Raises `ApiError`."""
        deadline = time.monotonic() + self._gateway.replicas.wait_s
        failed_once: set[tuple[str, str]] = set()
        while True:
            lease, trial = await self._lease(exchange, deadline)
            replica, incarnation = lease.replica, lease.replica.incarnation
            try:
                attempt = await self._send(exchange, lease)
            except BaseException:
                if trial is not None:
                    trial.abandoned()
                raise
            if isinstance(attempt, Attempt):
                attempt.trial = trial
                server = (replica.name, incarnation)
                # A crashing server may return 500, and a restarted one 404 because its adapters are not loaded. Check
                # the server's health, then retry once per server process.
                if (attempt.status < 500 and attempt.status != 404) or server in failed_once:
                    if trial is not None and not (exchange.call.stream and attempt.status == 200):
                        trial.answered()
                    return attempt
                failed_once.add(server)
                body = attempt.body[:300].decode(errors="replace")
                log.warning("server suspected", replica=replica.name, status=attempt.status, body=body)
                replica.suspect()
                may_have_died = attempt.status >= 500
            else:
                may_have_died = attempt.sent
            if may_have_died:
                await self._report_failure(exchange, replica, incarnation, trial, deadline)
            elif trial is not None:
                trial.abandoned()

    async def stream_failed(self, exchange: Exchange, attempt: Attempt) -> None:
        """Report that a server failed in the middle of a stream. Waits until it is known whether the server died."""
        deadline = time.monotonic() + self._gateway.replicas.wait_s
        replica = attempt.lease.replica
        await self._report_failure(exchange, replica, attempt.incarnation, attempt.trial, deadline)

    async def _lease(self, exchange: Exchange, deadline: float) -> tuple[Lease, Trial | None]:
        """Wait for a replica. A request that was in flight when servers died also waits until it may be tried
        alone."""
        trajectory = (
            exchange.caller.trajectory
        )  # also if nothing is captured: its pin and its side of a split hold
        opened = trajectory.opened if trajectory is not None else None

        prefer = least_loaded if trajectory is None else partial(replica_of, trajectory.id)

        alone = bool(self.deadly.suspects) and await self.deadly.admit(exchange.request_hash())
        try:
            lease = await self._fleet.acquire(
                lambda: self._router.resolve(exchange.call.params.model, opened), prefer, deadline
            )
        except BaseException:
            if alone:
                self.deadly.solo.release()
            raise
        if not self.deadly.suspects and not alone:
            return lease, None
        return lease, self.deadly.trial(exchange.request_hash(), lease.replica, alone=alone)

    async def _send(self, exchange: Exchange, lease: Lease) -> Attempt | UpstreamError:
        """Send the call once, to the replica of `lease`. Returns the error if the connection or the server failed.

        Releases `lease`, except for a streamed answer, whose `Attempt.close` does. Raises a 504 `ApiError` if the
        server exceeds replicas.timeout_s."""
        dialect, call, upstream = exchange.dialect, exchange.call, lease.replica.upstream
        started_at, incarnation = now_us(), lease.replica.incarnation
        requested = streamed = False
        try:
            # A completion with `echo` returns the prompt as text. A captured call needs it before the completion.
            if exchange.captured and call.echo is not None and call.echo.texts is None:
                call.echo.texts = await _prompt_texts(call.echo, lease)
            body = dialect.upstream_body(call, lease.version, capture=exchange.captured)
            requested = True
            reply = await upstream.request(
                "POST", dialect.path, body, timeout_s=self._gateway.replicas.timeout_s
            )
            exchange.mark_sent(lease, started_at)
            streamed = call.stream and reply.status == 200
            return Attempt(lease, reply, incarnation, b"" if streamed else await reply.read())
        except (UpstreamError, asyncio.CancelledError) as error:
            # The server may have received the completion: not if /detokenize failed, or if no connection was made.
            if requested and (not isinstance(error, UpstreamError) or error.sent):
                exchange.mark_sent(lease, started_at)
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, UpstreamTimeoutError):
                raise timed_out() from error
            log.warning("connection to inference server failed", replica=lease.replica.name, error=str(error))
            lease.replica.suspect()  # no call is sent to it until its health was checked
            return error
        finally:
            if not streamed:
                lease.release()

    async def _report_failure(
        self, exchange: Exchange, replica: Replica, incarnation: str, trial: Trial | None, deadline: float
    ) -> None:
        """Record that the request was in flight when its server failed. Waits until it is known whether the server
        died."""
        if trial is not None:
            trial.failed()
        request = exchange.request_hash()
        self.deadly.failed(request, replica, incarnation)
        while replica.suspected and not self._fleet.closing and (left := deadline - time.monotonic()) > 0:
            changed = self._fleet.change()
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                break
        self.deadly.server_checked(request)


async def _prompt_texts(echo: Echo, lease: Lease) -> list[str]:
    """Return the prompts of a completion with `echo` as texts; the server decodes those given as token ids.

    A prompt that the server can't decode gives an empty text. The completion request then fails with the server's
    error message. Raises `UpstreamError`, and a 502 `ApiError` for an answer that is no detokenized text."""
    texts = []
    for prompt in echo.prompts:
        if isinstance(prompt, str):
            texts.append(prompt)
            continue
        body = msgspec.json.encode({"model": lease.version, "tokens": prompt})
        status, answer = await lease.replica.upstream.fetch("POST", "/detokenize", body)
        try:
            texts.append(_detokenized_decoder.decode(answer).prompt if status == 200 else "")
        except msgspec.DecodeError as error:
            raise bad_answer("/detokenize", error) from error
    return texts
