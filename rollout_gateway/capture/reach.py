"""From a call to an inference server's answer: waits for a server, asks, asks again where it went away."""

from __future__ import annotations

import asyncio
import time

import msgspec

from pipeline.config import GatewayConfig
from pipeline.events import now_us
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.exchange import Attempt, Caller, Exchange
from rollout_gateway.capture.runs import Trajectory
from rollout_gateway.dialects.calls import Call, Echo
from rollout_gateway.dialects.endpoints import Dialect
from rollout_gateway.http.errors import ApiError, ClientGoneError, stopping, timed_out
from rollout_gateway.http.upstream import UpstreamError, UpstreamTimeoutError
from rollout_gateway.serving.blame import Blame
from rollout_gateway.serving.replicas import Fleet, Lease, Replica, least_loaded
from rollout_gateway.serving.routing import Router

log = get_logger("rollout_gateway.capture.reach")


class _Text(msgspec.Struct):
    prompt: str


_text_decoder = msgspec.json.Decoder(_Text)


class Reach:
    """Asks the replicas of `fleet`."""

    def __init__(self, gateway: GatewayConfig, fleet: Fleet, router: Router) -> None:
        self._gateway, self._fleet, self._router = gateway, fleet, router
        self.blame = Blame(gateway.replicas.deadly_request_s)

    async def answer(
        self, dialect: Dialect, call: Call, caller: Caller, exchange: Exchange | None
    ) -> Attempt:
        """Have the call answered by a replica that serves the version it is routed to.

        Waits for a replica, and asks again where a server went away before its answer was whole: nothing of it had reached
        the client or the log. A streamed answer is handed out unread, with its lease. Any other is read, and its lease given
        back. Raises `ApiError`, and `ClientGoneError` when the client has left."""
        deadline = time.monotonic() + self._gateway.replicas.wait_s
        trajectory = caller.trajectory  # where nothing is captured too: its pin and its side of a split hold
        failed_lives: set[tuple[str, str]] = set()
        while True:
            alone = await self._admit(call, exchange) if self.blame.cases else False
            try:
                lease = await self._lease(call, trajectory, deadline)
            except BaseException:
                if alone:
                    self.blame.turn.release()
                raise
            replica, incarnation = lease.replica, lease.replica.incarnation
            trial = None
            if alone or self.blame.cases:
                trial = self.blame.trial(_request(call, exchange), replica, alone=alone)
            try:
                attempt = await self._ask(dialect, call, caller, lease, exchange)
            except BaseException:
                if trial is not None:
                    trial.left()
                raise
            life = (replica.name, incarnation)
            if isinstance(attempt, Attempt):
                attempt.incarnation, attempt.trial = incarnation, trial
                # A dying server says 500, and a restarted one knows no adapter: have it looked at once, then ask again.
                if (attempt.status < 500 and attempt.status != 404) or life in failed_lives:
                    if trial is not None and not (call.stream and attempt.status == 200):
                        trial.answered()
                    return attempt
                failed_lives.add(life)
                log.warning(
                    "doubted", replica=replica.name, status=attempt.status, body=attempt.body[:300].decode()
                )
                replica.suspect()
                died = attempt.status >= 500
            else:
                died = attempt.sent
            if not died:
                if trial is not None:
                    trial.left()
                continue
            if trial is not None:
                trial.broke()
            await self._blame(_request(call, exchange), replica, incarnation, deadline)

    async def _admit(self, call: Call, exchange: Exchange | None) -> bool:
        """Raises a 502 `ApiError` for a request that kills; whether it holds the turn of those that are tried alone."""
        request = _request(call, exchange)
        self.blame.check(request)
        alone = await self.blame.wait_turn(request)
        try:
            self.blame.check(request)
        except ApiError:
            if alone:
                self.blame.turn.release()
            raise
        return alone

    async def _lease(self, call: Call, trajectory: Trajectory | None, deadline: float) -> Lease:
        def prefer(replicas: list[Replica]) -> Replica:
            for replica in replicas:
                if trajectory is not None and replica.name == trajectory.replica:
                    return replica
            return least_loaded(replicas)

        return await self._fleet.acquire(
            lambda: self._router.version(call.params.model, trajectory), prefer, deadline
        )

    async def _blame(self, request: str, replica: Replica, incarnation: str, deadline: float) -> None:
        """Note that `request` was in flight when the server failed, and wait until it is known whether the server died."""
        self.blame.broke(request, replica, incarnation)
        while replica.doubted and not self._fleet.closing and (left := deadline - time.monotonic()) > 0:
            changed = self._fleet.change()
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                break
        self.blame.looked(request)

    async def broke_off(self, call: Call, exchange: Exchange, attempt: Attempt) -> None:
        """A server broke off in the middle of a stream. Suspects it; returns once it was looked at."""
        replica = attempt.lease.replica
        replica.suspect()
        if attempt.trial is not None:
            attempt.trial.broke()
        deadline = time.monotonic() + self._gateway.replicas.wait_s
        await self._blame(_request(call, exchange), replica, attempt.incarnation, deadline)

    async def _ask(
        self, dialect: Dialect, call: Call, caller: Caller, lease: Lease, exchange: Exchange | None
    ) -> Attempt | UpstreamError:
        """One try; the error where the server went away.

        Raises `ClientGoneError`, and a 504 `ApiError` when time is up."""
        if caller.gone or caller.cut:
            lease.release()
            raise stopping() if caller.cut else ClientGoneError()
        started_at = now_us()
        streaming_on = False
        try:
            if exchange is not None and call.echo is not None and call.echo.texts is None:
                call.echo.texts = await self._prompt_texts(call.echo, lease)
            body = dialect.upstream_body(call, lease.version, capture=exchange is not None)
            reply = await lease.replica.upstream.request(
                "POST",
                dialect.path,
                body,
                timeout_s=self._gateway.replicas.timeout_s,
                on_sent=caller.when_gone if exchange is None else exchange.sent,
            )
            attempt = Attempt(lease, reply, b"", started_at)
            if exchange is not None:
                exchange.take(attempt)
            if caller.trajectory is not None:
                caller.trajectory.replica = lease.replica.name
            streaming_on = call.stream and reply.status == 200
            if not streaming_on:
                attempt.body = await reply.read()
            return attempt
        except UpstreamTimeoutError as error:
            _asked(exchange, lease)
            raise timed_out() from error
        except UpstreamError as error:
            if error.sent:
                _asked(exchange, lease)
            if caller.has_left():
                raise ClientGoneError from error
            if caller.was_cut():
                raise stopping() from error
            log.warning("upstream", replica=lease.replica.name, error=str(error))
            lease.replica.suspect()
            return error
        finally:
            if not streaming_on:
                caller.when_gone(None)
                lease.release()

    async def _prompt_texts(self, echo: Echo, lease: Lease) -> list[str]:
        """The prompts of an echoed completion, decoded by the server. Empty texts where it can't decode them: the server
        says what is wrong with the prompt when it is asked for the completion."""
        texts = []
        for prompt in echo.prompts:
            if isinstance(prompt, str):
                texts.append(prompt)
                continue
            body = msgspec.json.encode({"model": lease.version, "tokens": prompt})
            status, answer = await lease.replica.upstream.fetch("POST", "/detokenize", body)
            texts.append(_text_decoder.decode(answer).prompt if status == 200 else "")
        return texts


def _request(call: Call, exchange: Exchange | None) -> str:
    return call.hash() if exchange is None else exchange.hash()


def _asked(exchange: Exchange | None, lease: Lease) -> None:
    """The call was sent: if it gets no answer, it is recorded as one that this version was asked."""
    if exchange is not None:
        exchange.version, exchange.replica = lease.version, lease.replica.name
