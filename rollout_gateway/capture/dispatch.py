"""Sends a model call to an inference server ("replica"): waits for one that serves the call's version, and asks another
one if it fails. `handler` has every call of a policy answered here. A "lease" keeps the version loaded meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial

from pipeline.config import GatewayConfig
from pipeline.events import now_us
from pipeline.telemetry.logs import get_logger
from rollout_gateway.capture.exchange import Exchange
from rollout_gateway.dialects.endpoints import upstream_body
from rollout_gateway.dialects.shape import shape_problem
from rollout_gateway.http.errors import ApiError, answer_too_long, invalid_body, timed_out
from rollout_gateway.http.upstream import UpstreamError, UpstreamInvalidError, UpstreamReply, UpstreamTimeoutError
from rollout_gateway.serving.replicas import Fleet, Lease, least_loaded, replica_of
from rollout_gateway.serving.routing import VersionRouter

logger = get_logger("rollout_gateway.capture.dispatch")


@dataclass(eq=False, slots=True)
class Attempt:
    """A call that was sent to an inference server, and its response."""

    lease: Lease
    reply: UpstreamReply
    body: bytes = b""
    """The whole response; empty if it is streamed."""

    def close(self) -> None:
        """End a streamed response, whether or not it was read to its end, and release the lease."""
        self.reply.close()
        self.lease.release()


class Dispatcher:
    """Sends calls to the replicas of `fleet`."""

    def __init__(self, gateway: GatewayConfig, fleet: Fleet, router: VersionRouter) -> None:
        self._gateway, self._fleet, self._router = gateway, fleet, router

    async def answer(self, exchange: Exchange) -> Attempt:
        """Wait for a replica that serves the version of the call, send the call to it, and return the response.

        If the server fails before the answer is complete, the call is sent to one more; this is safe because nothing
        has been sent to the client or recorded. It is sent to no third one, because the call itself may be what ends
        the servers. A streamed response is returned unread, and the caller must close it; any other response is
        returned read. Raises `ApiError`."""
        deadline = time.monotonic() + self._gateway.replicas.wait_s
        failed: list[str] = []
        """Names of the servers that the call was sent to and that failed."""
        while True:
            lease = await self._acquire_lease(exchange, deadline)
            replica = lease.replica
            attempt = await self._send(exchange, lease)
            if isinstance(attempt, Attempt):
                # A crashing server may return 500, and a restarted one 404 because its adapters are not loaded.
                status = attempt.reply.status
                if failed or (status < 500 and status != 404):
                    return attempt
                if reason := shape_problem(exchange.call.fields):
                    raise invalid_body(f"The inference server can't read the call: {reason}.")
                # Not its body, which may repeat the call: the server's own log has more.
                logger.warning("server suspected", replica=replica.name, status=status)
                replica.suspect()
            elif not attempt.sent:
                continue  # no server had the call, so this counts as no failure
            failed.append(replica.name)
            if len(failed) == 2:
                raise _both_failed(failed)

    async def _acquire_lease(self, exchange: Exchange, deadline: float) -> Lease:
        """Wait for a replica until `deadline`, by `time.monotonic`. Calls of a run go to the same one while they can,
        for its prefix cache. Raises `ApiError`."""
        trajectory = exchange.caller.trajectory
        opened = trajectory.opened if trajectory is not None else None
        prefer = least_loaded if trajectory is None else partial(replica_of, trajectory.id)
        return await self._fleet.acquire(
            lambda: self._router.resolve(exchange.call.params.model, opened), prefer, deadline
        )

    async def _send(self, exchange: Exchange, lease: Lease) -> Attempt | UpstreamError:
        """Send the call once, to the replica of `lease`. Returns the error if the connection or the server failed.

        Releases `lease`, except for a streamed answer, whose `Attempt.close` does. Raises a 504 `ApiError` if the
        server exceeds replicas.timeout_s."""
        call, upstream = exchange.call, lease.replica.upstream
        started_at = now_us()
        streamed = False
        try:
            body = upstream_body(call, lease.version, answer_id=exchange.answer_id)
            reply = await upstream.request("POST", call.served_by, body, timeout_s=self._gateway.replicas.timeout_s)
            exchange.mark_sent(lease, started_at)
            streamed = call.stream and not call.asks_whole and reply.status == 200
            return Attempt(lease, reply, b"" if streamed else await reply.read())
        except asyncio.CancelledError:
            exchange.mark_sent(lease, started_at)  # the server may have received the call
            raise
        except UpstreamError as error:
            if error.sent:
                exchange.mark_sent(lease, started_at)
            if isinstance(error, UpstreamTimeoutError):
                raise timed_out() from error
            if isinstance(error, UpstreamInvalidError):  # the call is the reason, not the server
                raise answer_too_long(error) from error
            logger.warning("connection to inference server failed", replica=lease.replica.name, error=str(error))
            lease.replica.suspect()  # no call is sent to it until its health was checked
            return error
        finally:
            if not streamed:
                lease.release()


def _both_failed(servers: list[str]) -> ApiError:
    """Return the 502 for a call that two servers got and did not answer. Its header tells clients not to try again."""
    message = (
        f"The call was sent to {servers[0]} and then to {servers[1]}, and each failed before it had answered. The call "
        "may be what ends them, so it is not sent again: the inference servers' logs say why they failed. If it is not "
        "the cause, repeat it."
    )
    return ApiError(502, "servers_failed", message, headers=((b"x-should-retry", b"false"),))
