"""Has a call answered by an inference server: waits for one, asks it, and asks again if it went away."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import msgspec

from pipeline.config import GatewayConfig
from pipeline.events import now_us
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.exchange import Exchange
from rollout_gateway.dialects.calls import Echo
from rollout_gateway.http.errors import timed_out
from rollout_gateway.http.upstream import UpstreamError, UpstreamReply, UpstreamTimeoutError
from rollout_gateway.serving.deadly_requests import DeadlyRequests, Trial
from rollout_gateway.serving.replicas import Fleet, Lease, Replica, least_loaded
from rollout_gateway.serving.routing import VersionRouter

log = get_logger("rollout_gateway.capture.dispatch")


class _Detokenized(msgspec.Struct):
    prompt: str


_detokenized_decoder = msgspec.json.Decoder(_Detokenized)


@dataclass(eq=False, slots=True)
class Attempt:
    """A call that an inference server answers."""

    lease: Lease
    reply: UpstreamReply
    incarnation: str
    """The server process that was asked."""
    body: bytes = b""
    """The whole reply, unless it is streamed."""
    trial: Trial | None = None
    """Set for a request that was in flight when its server died before."""

    @property
    def status(self) -> int:
        return self.reply.status

    def close(self) -> None:
        """End a streamed reply, read or not."""
        self.reply.close()
        self.lease.release()


class Dispatcher:
    """Asks the replicas of `fleet`."""

    def __init__(self, gateway: GatewayConfig, fleet: Fleet, router: VersionRouter) -> None:
        self._gateway, self._fleet, self._router = gateway, fleet, router
        self.deadly = DeadlyRequests(gateway.replicas.deadly_request_s)

    async def answer(self, exchange: Exchange) -> Attempt:
        """Have the call answered by a replica that serves the version it is routed to.

        Waits for a replica. Asks again if a server went away before its answer was whole, since nothing of it reached
        the client or the log. A streamed answer is returned unread and must be closed; any other is read. Raises
        `ApiError`."""
        deadline = time.monotonic() + self._gateway.replicas.wait_s
        failed_once: set[tuple[str, str]] = set()
        while True:
            lease, trial = await self._lease(exchange, deadline)
            replica, incarnation = lease.replica, lease.replica.incarnation
            try:
                attempt = await self._ask(exchange, lease)
            except BaseException:
                if trial is not None:
                    trial.abandoned()
                raise
            if isinstance(attempt, Attempt):
                attempt.trial = trial
                server = (replica.name, incarnation)
                # A dying server answers 500, and a restarted one knows no adapter. Either is checked, then asked again.
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
        """Report that a server failed in the middle of a stream. Returns once it is known whether the server died."""
        deadline = time.monotonic() + self._gateway.replicas.wait_s
        replica = attempt.lease.replica
        await self._report_failure(exchange, replica, attempt.incarnation, attempt.trial, deadline)

    async def _lease(self, exchange: Exchange, deadline: float) -> tuple[Lease, Trial | None]:
        """Wait for a replica. A request that was in flight when a server died may also have to wait for its turn."""
        trajectory = (
            exchange.caller.trajectory
        )  # also if nothing is captured: its pin and its side of a split hold
        opened = trajectory.opened if trajectory is not None else None

        def prefer(replicas: list[Replica]) -> Replica:
            for replica in replicas:
                if trajectory is not None and replica.name == trajectory.replica:
                    return replica
            return least_loaded(replicas)

        alone = bool(self.deadly.cases) and await self.deadly.admit(exchange.request_hash())
        try:
            lease = await self._fleet.acquire(
                lambda: self._router.version(exchange.call.params.model, opened), prefer, deadline
            )
        except BaseException:
            if alone:
                self.deadly.turn.release()
            raise
        if not self.deadly.cases and not alone:
            return lease, None
        return lease, self.deadly.trial(exchange.request_hash(), lease.replica, alone=alone)

    async def _ask(self, exchange: Exchange, lease: Lease) -> Attempt | UpstreamError:
        """Make one attempt. Returns the error if the server went away. Raises a 504 `ApiError` if it took too long."""
        dialect, call, upstream = exchange.dialect, exchange.call, lease.replica.upstream
        started_at, incarnation, streamed = now_us(), lease.replica.incarnation, False
        try:
            if exchange.captured and call.echo is not None and call.echo.texts is None:
                call.echo.texts = await _prompt_texts(call.echo, lease)
            body = dialect.upstream_body(call, lease.version, capture=exchange.captured)
            reply = await upstream.request(
                "POST", dialect.path, body, timeout_s=self._gateway.replicas.timeout_s
            )
            exchange.sent_to(lease, started_at)
            if exchange.caller.trajectory is not None:
                exchange.caller.trajectory.replica = lease.replica.name
            streamed = call.stream and reply.status == 200
            return Attempt(lease, reply, incarnation, b"" if streamed else await reply.read())
        except (UpstreamError, asyncio.CancelledError) as error:
            if not isinstance(error, UpstreamError) or error.sent:
                exchange.sent_to(lease, started_at)
            if isinstance(error, asyncio.CancelledError):
                raise
            if isinstance(error, UpstreamTimeoutError):
                raise timed_out() from error
            log.warning("inference server failed", replica=lease.replica.name, error=str(error))
            lease.replica.suspect()
            return error
        finally:
            if not streamed:
                lease.release()

    async def _report_failure(
        self, exchange: Exchange, replica: Replica, incarnation: str, trial: Trial | None, deadline: float
    ) -> None:
        """Note that the request was in flight when its server failed. Waits until it is known whether the server
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
    """The prompts of an echoed completion, decoded by the server.

    A prompt that the server can't decode gives an empty text. The server says what is wrong with it when it is asked
    for the completion."""
    texts = []
    for prompt in echo.prompts:
        if isinstance(prompt, str):
            texts.append(prompt)
            continue
        body = msgspec.json.encode({"model": lease.version, "tokens": prompt})
        status, answer = await lease.replica.upstream.fetch("POST", "/detokenize", body)
        texts.append(_detokenized_decoder.decode(answer).prompt if status == 200 else "")
    return texts
